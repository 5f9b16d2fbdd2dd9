"""From wire requests to engine requests: tokens, checks that need the model, seeds, children."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoTokenizer

from producer.errors import ContextLengthExceeded, InvalidRequest, ModelUnavailable
from producer.sampling import SamplingParams
from producer.wire import Choice, GenerateRequest, Usage
from tests.tiny_engine import byte_tokenizer
from worker.engine.inputs import InputProcessor, ModelLimits, _fingerprint
from worker.engine.model_loader import local_model_path
from worker.engine.output_collector import OutputCollector
from worker.engine.request import Request

LIMITS = ModelLimits(max_model_len=512, vocab_size=49152, eos_token_ids=frozenset({2}))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(local_model_path("demo"))


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> InputProcessor:
    return InputProcessor(tokenizer, LIMITS)


def wanted(request_id: str = "r", **fields: Any) -> GenerateRequest:
    names = ("prompt", "messages", "prompt_token_ids", "kind", "continuations", "tier", "source")
    own = {name: fields.pop(name) for name in names if name in fields}
    if not {"prompt", "messages", "prompt_token_ids"} & own.keys():
        own["prompt"] = "Hello"
    return GenerateRequest(id=request_id, params=SamplingParams(**fields), **own)


def prepared(inputs: InputProcessor, request: GenerateRequest) -> Request:
    (single,) = inputs.prepare_all(request)
    return single


def refusal(inputs: InputProcessor, request: GenerateRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        inputs.prepare_all(request)
    assert caught.value.request_id == request.id
    return caught.value


# Prompts


@pytest.mark.parametrize("text", ["Hello", " leading", "日本語 😀 e\u0301", "<|im_start|>user\nhi<|im_end|>\n", "a\n\n\tb", "x" * 500])
def test_a_prompt_becomes_the_tokenizers_tokens(inputs: InputProcessor, tokenizer: Any, text: str) -> None:
    request = prepared(inputs, wanted(prompt=text, tier="batch", source="s"))
    assert request.prompt_token_ids == tokenizer(text).input_ids
    assert (request.id, request.tier, request.source, request.kind) == ("r", "batch", "s", "generate")
    assert request.eos_token_ids == {2}


def test_messages_become_the_chat_templates_tokens(inputs: InputProcessor, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert prepared(inputs, wanted(messages=messages)).prompt_token_ids == rendered["input_ids"]


def test_token_ids_are_taken_as_they_are(inputs: InputProcessor) -> None:
    assert prepared(inputs, wanted(prompt_token_ids=[5, 2, 49151])).prompt_token_ids == [5, 2, 49151]


def test_vocabularies_are_told_apart_by_what_their_ids_mean(inputs: InputProcessor, tokenizer: Any) -> None:
    again = InputProcessor(AutoTokenizer.from_pretrained(local_model_path("demo")), LIMITS)
    assert (again.vocabulary, len(again.vocabulary)) == (inputs.vocabulary, 32)
    grown = deepcopy(tokenizer)
    grown.add_tokens(["<one more>"])
    others = [InputProcessor(other, LIMITS) for other in (grown, byte_tokenizer())]
    assert len({other.vocabulary for other in (inputs, *others)}) == 3
    for other in others:
        other.check_resumable([], inputs.vocabulary)
        other.check_resumable([1, 2], None)
        other.check_resumable([1, 2], other.vocabulary)
        with pytest.raises(ModelUnavailable, match="another vocabulary"):
            other.check_resumable([1, 2], inputs.vocabulary)


def test_fingerprint_does_not_depend_on_the_order_in_which_a_tokenizer_gives_its_vocabulary() -> None:
    assert _fingerprint({"a": 0, "b": 1, "c": 1}) == _fingerprint({"c": 1, "b": 1, "a": 0})


def with_template(tokenizer: Any, template: str | None) -> InputProcessor:
    other = deepcopy(tokenizer)
    other.chat_template = template
    return InputProcessor(other, LIMITS)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "chat template"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{% for %}", "chat template"),
    ],
)
def test_what_the_chat_template_refuses_is_the_callers(tokenizer: Any, template: str | None, says: str) -> None:
    error = refusal(with_template(tokenizer, template), wanted(messages=[{"role": "user", "content": "secret"}]))
    assert error.field == "messages"
    assert says in error.message
    assert "secret" not in error.message


def test_messages_that_render_to_nothing_are_refused(tokenizer: Any) -> None:
    assert refusal(with_template(tokenizer, "{{ '' }}"), wanted(messages=[{"role": "user", "content": "x"}])).field == "messages"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": [1, 49152]}, "prompt_token_ids"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_field(inputs: InputProcessor, fields: dict[str, Any], field: str) -> None:
    assert refusal(inputs, wanted(**fields)).field == field


# Lengths


def test_prompt_and_output_must_fit_the_context(inputs: InputProcessor) -> None:
    assert prepared(inputs, wanted(prompt_token_ids=[5] * 500, max_tokens=12)).max_tokens == 12
    error = refusal(inputs, wanted(prompt_token_ids=[5] * 500, max_tokens=13))
    assert isinstance(error, ContextLengthExceeded)
    assert all(number in error.message for number in ("500", "13", "512"))
    assert error.field == "max_tokens"
    assert refusal(inputs, wanted(prompt_token_ids=[5] * 512, max_tokens=1)).field == "prompt"


def test_max_tokens_defaults_to_what_is_left(inputs: InputProcessor) -> None:
    assert prepared(inputs, wanted()).max_tokens == 256
    assert prepared(inputs, wanted(prompt_token_ids=[5] * 500)).max_tokens == 12
    assert prepared(inputs, wanted(min_tokens=300)).max_tokens == 300
    assert isinstance(refusal(inputs, wanted(prompt_token_ids=[5] * 512)), ContextLengthExceeded)
    assert isinstance(refusal(inputs, wanted(prompt_token_ids=[5] * 500, min_tokens=20)), ContextLengthExceeded)


def test_a_prompt_too_long_by_its_bytes_is_refused_untokenised(tokenizer: Any) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            assert not name.startswith("encode"), "tokenised"
            return getattr(tokenizer.backend_tokenizer, name)

    class Watched:
        backend_tokenizer = Untouchable()
        chat_template = tokenizer.chat_template
        apply_chat_template = tokenizer.apply_chat_template

    watched = InputProcessor(Watched(), LIMITS)
    for fields in ({"prompt": "x" * 500_000}, {"messages": [{"role": "user", "content": "x" * 500_000}]}):
        error = refusal(watched, wanted(**fields))
        assert isinstance(error, ContextLengthExceeded)
        assert "at least" in error.message


def test_the_longest_token_may_fill_the_context(tokenizer: Any) -> None:
    longest = max((token for token in tokenizer.get_vocab() if token.isascii()), key=len)
    text = tokenizer.convert_tokens_to_string([longest]) * 20
    inputs = InputProcessor(tokenizer, ModelLimits(max_model_len=len(tokenizer(text).input_ids) + 1, vocab_size=49152))
    assert prepared(inputs, wanted(prompt=text)).max_tokens == 1


# Seeds and stops


def test_seeds_are_given_or_derived_from_the_id(tokenizer: Any, inputs: InputProcessor) -> None:
    assert prepared(inputs, wanted(seed=7)).seed == 7
    assert prepared(inputs, wanted("a")).seed == prepared(inputs, wanted("a")).seed != prepared(inputs, wanted("b")).seed
    other = InputProcessor(tokenizer, ModelLimits(max_model_len=512, vocab_size=49152, seed=1))
    assert prepared(other, wanted("a")).seed != prepared(inputs, wanted("a")).seed
    assert prepared(other, wanted("a", seed=7)).seed == 7


def test_ignore_eos_leaves_no_eos(inputs: InputProcessor) -> None:
    assert prepared(inputs, wanted(ignore_eos=True)).eos_token_ids == frozenset()


# Several outputs


def test_n_outputs_are_n_requests_with_seeds_of_their_own(inputs: InputProcessor) -> None:
    single = prepared(inputs, wanted(seed=7))
    children = inputs.prepare_all(wanted(seed=7, n=3))
    assert [child.id for child in children] == ["r#0", "r#1", "r#2"]
    assert children[0].seed == single.seed
    assert len({child.seed for child in children}) == 3
    assert all(child.params.n == 1 and child.prompt_token_ids == single.prompt_token_ids for child in children)


@pytest.mark.parametrize(
    ("prompt", "continuation", "scored"),
    [
        ("The capital of France is", " Paris", " Paris"),
        ("The capital of France is ", "Paris", " Paris"),
        ("Yes or no?", "\n\nYes", "\n\nYes"),
        ("x", " 😀", " 😀"),
    ],
)
def test_a_continuation_is_scored_from_where_its_tokens_begin(
    inputs: InputProcessor, tokenizer: Any, prompt: str, continuation: str, scored: str
) -> None:
    (request,) = inputs.prepare_all(wanted(prompt=prompt, kind="score", continuations=[continuation]))
    assert request.prompt_token_ids == tokenizer(prompt + continuation).input_ids
    assert tokenizer.decode(request.prompt_token_ids[request.score_start :]) == scored
    assert request.score_start > 0
    assert request.max_tokens == 0


def test_a_continuation_that_swallows_the_prompt_is_scored_by_its_own_tokens(inputs: InputProcessor, tokenizer: Any) -> None:
    assert len(tokenizer("hello").input_ids) == 1
    (request,) = inputs.prepare_all(wanted(prompt="hel", kind="score", continuations=["lo"]))
    prompt = tokenizer("hel").input_ids
    assert request.prompt_token_ids == prompt + tokenizer("lo").input_ids
    assert request.score_start == len(prompt)


def test_token_ids_are_followed_by_the_continuations_own(inputs: InputProcessor, tokenizer: Any) -> None:
    requests = inputs.prepare_all(wanted(prompt_token_ids=[5, 6], kind="score", continuations=[" yes", " no"]))
    assert [request.id for request in requests] == ["r#0", "r#1"]
    assert [request.prompt_token_ids for request in requests] == [[5, 6, *tokenizer(text).input_ids] for text in (" yes", " no")]
    assert {request.score_start for request in requests} == {2}


def test_embedding_needs_the_prompt_alone(inputs: InputProcessor) -> None:
    request = prepared(inputs, wanted(prompt_token_ids=[5] * 512, kind="embed"))
    assert (request.kind, request.max_tokens) == ("embed", 0)
    assert isinstance(refusal(inputs, wanted(prompt_token_ids=[5] * 513, kind="embed")), ContextLengthExceeded)


def choice(index: int, token_ids: list[int]) -> Choice:
    return Choice(index, f"text {index}", token_ids, "stop" if index else "length", None)


def test_children_make_one_reply(inputs: InputProcessor) -> None:
    children = inputs.prepare_all(wanted(n=2))
    collector = OutputCollector("r", children)
    collector.put(children[1], choice(1, [7, 8]))
    assert not collector.complete
    collector.put(children[0], choice(0, [9]))
    assert collector.complete
    result = collector.result(worker="w")
    assert (result.id, result.text, result.token_ids, result.finish_reason, result.worker) == ("r", "text 0", [9], "length", "w")
    assert result.choices == [choice(0, [9]), choice(1, [7, 8])]
    assert result.usage == Usage(children[0].num_prompt_tokens, 3)


def test_scores_and_embeddings_make_replies_too(inputs: InputProcessor) -> None:
    children = inputs.prepare_all(wanted(prompt_token_ids=[5, 6], kind="score", continuations=[" yes", " no way"]))
    collector = OutputCollector("r", children)
    collector.put(children[0], -1.5)
    collector.put(children[1], -2.5)
    assert collector.complete
    assert collector.result().scores == [-1.5, -2.5]
    assert collector.result().usage == Usage(2, 3)
    (single,) = inputs.prepare_all(wanted(kind="embed"))
    collector = OutputCollector("r", [single])
    collector.put(single, [0.6, 0.8])
    assert collector.complete
    assert collector.result().embedding == [0.6, 0.8]


# Threads


def test_many_threads_prepare_what_one_does(inputs: InputProcessor) -> None:
    texts = [f"number {i} " * (i % 40 + 1) for i in range(200)]
    serial = [prepared(inputs, wanted(prompt=text)).prompt_token_ids for text in texts]
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(lambda text: prepared(inputs, wanted(prompt=text)).prompt_token_ids, texts))
    assert parallel == serial


def test_other_threads_run_while_a_long_prompt_is_tokenised(tokenizer: Any) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(max_model_len=2**31, vocab_size=49152))
    done = threading.Event()
    text = "some words, to be tokenised. " * 20_000
    thread = threading.Thread(target=lambda: (prepared(inputs, wanted(prompt=text)), done.set()))
    turns = 0
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10
