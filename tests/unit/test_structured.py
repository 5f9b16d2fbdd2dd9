"""Structured output: what is compiled, what is refused, and what a random model then writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from producer.errors import InvalidRequest
from producer.sampling import SamplingParams
from producer.wire import GenerateRequest
from tests.tiny_engine import run, tiny_engine
from tests.tiny_models import tiny_model
from worker.engine import structured
from worker.engine.inputs import InputProcessor, ModelLimits
from worker.engine.model_loader import local_model_path, prepare_model
from worker.engine.request import Request
from worker.engine.sampler import Sampler

pytest.importorskip("llguidance")

from worker.engine.structured import GrammarCompiler

VOCAB = 49152
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(local_model_path("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, {2})


def request(compiler: GrammarCompiler, response_format: Mapping[str, Any], seed: int = 0, **params: Any) -> Request:
    result = Request(f"r{seed}", [1], SamplingParams(**params), 200, seed=seed, eos_token_ids=frozenset({2}))
    result.grammar = compiler.compile(response_format)
    return result


def write(requests: list[Request], logits_seed: int = 0) -> None:
    """Let noise be the model, until every output is complete or 200 tokens long."""
    generator = torch.Generator().manual_seed(logits_seed)
    for _ in range(200):
        going = [r for r in requests if not r.grammar.complete]
        if not going:
            return
        for r, sampled in zip(going, Sampler()(torch.randn(len(going), VOCAB, generator=generator), going), strict=True):
            r.output_token_ids.append(sampled.token_id)
            r.grammar.catch_up(r.output_token_ids)


def text_of(tokenizer: Any, r: Request) -> str:
    text: str = tokenizer.decode(r.output_token_ids, skip_special_tokens=True)
    return text


def test_any_model_writes_what_the_schema_says(tokenizer: Any, compiler: GrammarCompiler) -> None:
    requests = [request(compiler, AS_SCHEMA, i, temperature=float(i > 0)) for i in range(4)]
    write(requests)
    for r in requests:
        person = json.loads(text_of(tokenizer, r))
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 150


def test_any_model_writes_what_the_regex_says(tokenizer: Any, compiler: GrammarCompiler) -> None:
    pattern = r"[0-9]{3}-[a-z]{2,5}(, [A-Z])?"
    requests = [request(compiler, {"type": "regex", "regex": pattern}, i) for i in range(4)]
    write(requests)
    assert all(re.fullmatch(pattern, text_of(tokenizer, r)) for r in requests)


def test_any_model_takes_one_of_the_choices(tokenizer: Any, compiler: GrammarCompiler) -> None:
    choices = ['a "b"', "new\nline", "back\\slash", "日本 😀", "a|b/c", "start: x"]
    requests = [request(compiler, {"type": "choice", "choices": choices}, i) for i in range(12)]
    write(requests)
    texts = [text_of(tokenizer, r) for r in requests]
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 1


def test_a_neighbour_without_grammar_is_left_alone(compiler: GrammarCompiler) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    free = Request("free", [1], SamplingParams(temperature=0.0), 9)
    together = Sampler()(logits, [request(compiler, {"type": "choice", "choices": ["yes"]}), free])
    assert together[1] == Sampler()(logits[1:], [free])[0]
    assert logits[1].argmax() == together[1].token_id != together[0].token_id


def test_a_resumed_output_goes_on_in_its_grammar(tokenizer: Any, compiler: GrammarCompiler) -> None:
    whole = request(compiler, AS_SCHEMA, 3)
    write([whole])
    resumed = request(compiler, AS_SCHEMA, 3)
    resumed.output_token_ids = whole.output_token_ids[:6]
    resumed.grammar.catch_up(resumed.output_token_ids)
    write([resumed], logits_seed=1)
    assert set(json.loads(text_of(tokenizer, resumed))) == {"name", "age"}


def test_requests_of_one_schema_do_not_share_their_state(tokenizer: Any, compiler: GrammarCompiler) -> None:
    first, second = request(compiler, AS_SCHEMA, 1), request(compiler, AS_SCHEMA, 2)
    write([first])
    assert not second.grammar.complete
    write([second], logits_seed=5)
    json.loads(text_of(tokenizer, second))


def test_where_nothing_may_follow_the_row_fails_alone(compiler: GrammarCompiler) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0] = -torch.inf
    logits[0, 7] = 0.0
    stuck = request(compiler, {"type": "choice", "choices": ["yes"]})
    results = Sampler()(logits, [stuck, Request("free", [1], SamplingParams(), 9)])
    assert results[0].error_code == "BATCH_FAILED"
    assert results[1].error_code is None


def test_what_grows_too_complex_on_its_first_step_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_LIMITS", {"step_lexer_fuel": 50})
    compiler = GrammarCompiler(tokenizer, VOCAB, {2})
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="refused: lexer error") as caught:
            compiler.compile({"type": "regex", "regex": "[ab]*a[ab]{20}c"})
        assert caught.value.field == "response_format"


def test_what_grows_too_complex_later_fails_alone_and_is_no_complete_output(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_LIMITS", {"max_lexer_states": 50})
    loaded = prepare_model(tiny_model("llama", vocab_size=VOCAB), tokenizer, "tiny")
    engine = tiny_engine(loaded)
    requests = [
        engine.inputs.prepare_all(
            GenerateRequest(id=name, prompt="x", params=SamplingParams(max_tokens=60, ignore_eos=True, response_format=form))
        )[0]
        for name, form in (("large", {"type": "regex", "regex": "[ab]*a[ab]{12}c"}), ("free", None))
    ]
    outputs = run(engine, requests)
    assert outputs["large"][-1].error_code == "INVALID_REQUEST"
    assert outputs["large"][-1].finish_reason is None
    assert outputs["free"][-1].finish_reason == "length"


@pytest.mark.parametrize(
    "response_format",
    [
        {},
        {"type": "xml"},
        {"type": 5},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
        {"type": "regex"},
        {"type": "regex", "regex": "(ab"},
        {"type": "regex", "regex": 5},
        {"type": "choice", "choices": []},
        {"type": "choice", "choices": ["a", 5]},
        {"type": "choice", "choices": "ab"},
    ],
)
def test_a_bad_response_format_is_refused_by_name(tokenizer: Any, compiler: GrammarCompiler, response_format: dict[str, Any]) -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=VOCAB)
    wanted = GenerateRequest(id="r", prompt="x", params=SamplingParams(max_tokens=4, response_format=response_format))
    with pytest.raises(InvalidRequest) as caught:
        InputProcessor(tokenizer, limits, compiler).prepare_all(wanted)
    assert (caught.value.field or "").startswith("response_format")
    assert caught.value.request_id == "r"


def test_text_is_no_grammar(compiler: GrammarCompiler) -> None:
    assert compiler.compile({"type": "text"}) is None
