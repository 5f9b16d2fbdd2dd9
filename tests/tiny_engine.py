"""An engine around a tiny random model and a tokenizer of single bytes: real parts, milliseconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producer.sampling import SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_model
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import LoadedModel, prepare_model
from worker.engine.model_runner import ModelRunner
from worker.engine.request import Request
from worker.engine.step import StepOutput

EOS = 256
RAISING = VOCAB_SIZE + 5  # a token that makes a step of `raising_model` raise, because it has no embedding
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Any:
    """Token ids 0-255 stand for bytes in the order of GPT-2's alphabet; 256 is EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # noqa: S106 - a token of another kind
    assert fast.eos_token_id == EOS
    fast.chat_template = CHAT_TEMPLATE
    return fast


@cache
def loaded_model() -> LoadedModel:
    """Shared: nothing of it may be changed."""
    return prepare_model(tiny_model("llama"), byte_tokenizer(), "tiny")


@cache
def raising_model() -> LoadedModel:
    """As `loaded_model`, but with `RAISING` as one of its tokens."""
    return replace(loaded_model(), vocab_size=RAISING + 1)


def tiny_engine(loaded: LoadedModel | None = None, **settings: Any) -> Engine:
    settings = {"num_blocks": 200, "block_size": 16, "max_batch_size": 32, "max_batch_tokens": 64, **settings}
    return Engine(EngineConfig(**settings), loaded or loaded_model())


def tiny_runner(loaded: LoadedModel, **settings: Any) -> ModelRunner:
    return ModelRunner(loaded, EngineConfig(**{"num_blocks": 16, **settings}).for_device("cpu"))


def request(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Request:
    """An engine request; keywords that it has no field for are sampling parameters. Greedy and without EOS unless told otherwise."""
    names = Request.__dataclass_fields__.keys() - SamplingParams.__dataclass_fields__.keys() | {"seed"}
    own = {name: fields.pop(name) for name in names if name in fields}
    params = SamplingParams(**{"temperature": 0.0, **fields})
    return Request(request_id, list(prompt), params, max_tokens, **own)


def run(engine: Engine, requests: Sequence[Request] = ()) -> dict[str, list[StepOutput]]:
    """Add requests and step until nothing is left; all outputs by request."""
    for item in requests:
        engine.add(item)
    outputs: dict[str, list[StepOutput]] = {item.id: [] for item in requests}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request.id, []).append(output)
    assert_idle(engine)
    return outputs


def computed_tokens(engine: Engine, requests: Sequence[Request] = ()) -> int:
    """Add requests of one prompt, run to the end, and count the tokens that the model saw."""
    engine.add_all(requests)
    total = 0
    while engine.has_work():
        engine.step()
        assert engine.last_step is not None
        total += engine.last_step.num_tokens
    assert_idle(engine)
    return total


def assert_idle(engine: Engine) -> None:
    """Every block is back."""
    stats = engine.stats()
    assert stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert stats.num_held == 0
