from __future__ import annotations

import json
from typing import Any

import pytest

from producer.bulk.lines import answer, custom_id_of, failure, parse_line, usage_of
from producer.bulk.spec import BulkSpec
from producer.errors import BatchFailed, InvalidRequest
from producer.wire import Choice, Result, TokenLogprob, Usage

RESULT = Result(id="j.1", text="Hi.", token_ids=[1, 2], usage=Usage(5, 2), model="m")


def line(value: object) -> Any:
    return parse_line(1, json.dumps(value), is_json=True)


def batch(body: dict[str, Any], **more: Any) -> Any:
    return line({"custom_id": "a", "method": "POST", "body": body, **more})


def test_chat_line_of_openais_guide_is_taken() -> None:
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello"}]
    parsed = batch({"model": "gpt-4o-mini", "messages": messages, "max_completion_tokens": 9, "top_p": 0.5}, url="/v1/chat/completions")
    assert (parsed.form, parsed.custom_id) == ("chat", "a")
    assert parsed.options == {"messages": messages, "max_tokens": 9, "top_p": 0.5}


def test_completion_line_takes_text_or_token_ids() -> None:
    assert batch({"prompt": "Once", "logprobs": 2}).options == {"prompt": "Once", "logprobs": 2}
    assert batch({"prompt": [1, 2, 3]}, url="/v1/completions").options == {"prompt_token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        ({"stream": False, "n": 2, "stop": ["\n"], "seed": None}, {"n": 2, "stop": ["\n"]}),
        ({"ignore_eos": True, "min_p": 0.1, "user": "u"}, {"ignore_eos": True, "min_p": 0.1, "user": "u"}),
    ],
)
def test_bodys_fields_become_the_clients_keywords(body: dict[str, Any], options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert batch({"messages": messages, **body}).options == {"messages": messages, **options}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("Once", {"prompt": "Once"}),
        (["Once"], {"prompt": "Once"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([7], {"prompt_token_ids": [7]}),
        ([[1, 2]], {"prompt_token_ids": [1, 2]}),
    ],
    ids=str,
)
def test_embeddings_line_takes_one_text_or_its_token_ids(given: object, options: dict[str, Any]) -> None:
    body = {"model": "text-embedding-3-small", "input": given, "encoding_format": "float"}
    parsed = batch(body, url="/v1/embeddings")
    assert (parsed.form, parsed.options) == ("embedding", {**options, "kind": "embed"})
    assert batch({"input": given}) == parsed


def test_plain_lines_are_a_string_an_object_or_text() -> None:
    assert line("Why?").options == {"prompt": "Why?"}
    parsed = line({"prompt": "Why?", "max_tokens": 3, "custom_id": "c"})
    assert (parsed.form, parsed.custom_id, parsed.options) == ("plain", "c", {"prompt": "Why?", "max_tokens": 3})
    assert parse_line(7, '{"not": "looked at"}', is_json=False).options == {"prompt": '{"not": "looked at"}'}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("17", "an object or a string, not int"),
        ('{"body": 3}', "body must be an object"),
        ('{"body": {"messages": []}, "url": "/v1/responses"}', "url must be one of"),
        ('{"body": {"messages": [], "stream": true}}', "stream must be absent"),
        ('{"body": {"messages": [], "tools": []}}', "unknown parameter: tools"),
        ('{"body": {"messages": [], "logprobs": 3}}', "logprobs must be true or false"),
        ('{"body": {"input": ["a", "b"]}, "url": "/v1/embeddings"}', "input must be one text"),
        ('{"body": {"input": [[1], [2]]}, "url": "/v1/embeddings"}', "input must be one text"),
        ('{"body": {"prompt": "x"}, "url": "/v1/embeddings"}', "input must be one text"),
        ('{"body": {"input": "x", "encoding_format": "base64"}}', "encoding_format must be float"),
        ('{"body": {"input": "x", "dimensions": 4}}', "unknown parameter: dimensions"),
        ('{"prompt": "x", "id": "mine"}', "unknown parameter: id"),
        ('{"prompt": "x", "tier": "realtime"}', "unknown parameter: tier"),
        ('{"prompt": "x", "custom_id": 4}', "custom_id must be a string"),
    ],
)
def test_wrong_lines_are_refused_with_the_field(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_line(1, text, is_json=True)


def test_error_of_a_wrong_line_finds_its_way_back() -> None:
    assert custom_id_of('{"custom_id": "a", "body": 3}') == "a"
    assert custom_id_of("nonsense") is custom_id_of("[]") is custom_id_of('{"custom_id": 4}') is None


def test_chat_answer_has_openais_shape() -> None:
    said = answer(batch({"messages": []}), "j.1", RESULT)
    assert (said["id"], said["custom_id"], said["error"], said["response"]["status_code"]) == ("j.1", "a", None, 200)
    body = said["response"]["body"]
    message = {"role": "assistant", "content": "Hi."}
    assert body["object"] == "chat.completion"
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert usage_of(said) == Usage(5, 2)


def test_completion_answer_has_all_choices_and_logprobs_by_token_id() -> None:
    logprobs = [TokenLogprob(1, -0.5, {1: -0.5, 9: -1.5})]
    choices = [Choice(0, "Hi.", [1, 2], "stop", None, logprobs), Choice(1, "Ho.", [3], "length")]
    said = answer(batch({"prompt": "x"}), "j.1", Result(id="j.1", choices=choices))
    first, second = said["response"]["body"]["choices"]
    assert (first["text"], second["text"], second["finish_reason"]) == ("Hi.", "Ho.", "length")
    assert first["logprobs"]["content"][0] == {
        "token_id": 1,
        "logprob": -0.5,
        "top_logprobs": [{"token_id": 1, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}],
    }


def test_embedding_answer_has_openais_shape() -> None:
    said = answer(batch({"input": "x"}), "j.1", Result(id="j.1", embedding=[0.6, 0.8], usage=Usage(5, 0), model="m"))
    assert said["response"]["body"] == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
        "model": "m",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert usage_of(said) == Usage(5, 0)


def test_plain_answer_is_flat() -> None:
    said = answer(line({"prompt": "x", "custom_id": "c"}), "j.1", RESULT)
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert said == {"id": "j.1", "line": 1, "custom_id": "c", "text": "Hi.", "finish_reason": "stop", "usage": usage, "model": "m"}
    assert usage_of(said) == Usage(5, 2)


def test_failure_has_openais_shape_and_the_line() -> None:
    said = failure(3, "a", "j.3.2", BatchFailed("the step raised"))
    assert said["error"] == {"code": "BATCH_FAILED", "message": "the step raised", "param": None}
    assert (said["id"], said["custom_id"], said["line"], said["response"]) == ("j.3.2", "a", 3, None)


def spec(**more: Any) -> BulkSpec:
    return BulkSpec(**{"job_id": "j", "input": "/i", "output": "/o", "errors": "/e", **more})


def test_request_ids_lead_back_to_their_lines_and_no_others_do() -> None:
    job = spec(job_id="nightly-2")
    assert job.request_id(17, 0) == "nightly-2.17"
    assert job.request_id(17, 2) == "nightly-2.17.2"
    assert job.line_number("nightly-2.17") == job.line_number("nightly-2.17.2") == 17
    assert job.line_number("nightly-3.17") is job.line_number("nightly-2") is job.line_number("") is None


def test_spec_survives_json_and_a_newer_version() -> None:
    job = spec(window=3, order="completion")
    assert BulkSpec.from_json(json.loads(json.dumps({**job.to_json(), "later": 1}))) == job


@pytest.mark.parametrize(
    "wrong",
    [{"job_id": "a.b"}, {"job_id": ""}, {"window": 0}, {"order": "random"}, {"output": "/i"}, {"input": "relative"}, {"queue": "{x}"}],
    ids=str,
)
def test_wrong_specs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        spec(**wrong)
