"""What the worker needs of an engine. `worker.engine.engine.Engine` provides it, and so do the tests' substitutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from producer.keys import Tier
from producer.wire import GenerateRequest
from worker.engine.request import Request
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepOutput, StepStats


class TextDelta(Protocol):
    """What pushing tokens adds to a request's text: see `worker.engine.detokenizer`."""

    @property
    def text(self) -> str: ...
    @property
    def stopped_by(self) -> str | None: ...
    @property
    def num_tokens_kept(self) -> int: ...


class Detokenizer(Protocol):
    """One request's incremental text; used by one thread at a time."""

    def push(self, token_ids: Sequence[int], finished: bool) -> TextDelta: ...


class InputProcessor(Protocol):
    """Turns wire requests into engine requests; called from the fetching thread."""

    def prepare_all(self, wire_request: GenerateRequest) -> list[Request]:
        """Tokenise and check. If the reply is to hold several outputs or scores, there are several requests, with ids of their own.

        Raises a `producer.errors.HeadraceError` that names the field.
        """
        ...

    @property
    def vocabulary(self) -> str:
        """Identifies the tokenizer's vocabulary; equal if the same token ids stand for the same tokens."""
        ...

    def check_resumable(self, token_ids: Sequence[int], vocabulary: str | None) -> None:
        """Raises `ModelUnavailable` if the model cannot continue from such output, whose ``vocabulary`` is None if not known."""
        ...


class EngineLimits(Protocol):
    """An engine's settings for its size and its callers: see `worker.engine.config`."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def source_weights(self) -> Mapping[str, float]: ...


def kernel_names(engine: EngineLike) -> str:
    """What computes the engine's steps, in words: ``triton fused cuda_graphs``."""
    return " ".join(name if value is True else str(value) for name, value in engine.kernels.items() if value)


class EngineLike(Protocol):
    """An engine. Its own thread calls everything except `config`, `inputs`, `make_detokenizer` and the names: these are for others."""

    @property
    def model_name(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def kernels(self) -> Mapping[str, str | bool]:
        """What computes its steps, under the engine's own names; for the log."""
        ...

    @property
    def last_step(self) -> StepStats | None:
        """The last step that computed anything."""
        ...

    @property
    def config(self) -> EngineLimits: ...

    @property
    def inputs(self) -> InputProcessor: ...

    def make_detokenizer(self, request: Request) -> Detokenizer: ...

    def add_all(self, requests: Sequence[Request]) -> None:
        """Take in what `InputProcessor.prepare_all` made of one request: all of it or, raising `ContextLengthExceeded`, nothing."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; an unknown one is not an error. No output follows."""
        ...

    def step(self) -> list[StepOutput]:
        """Run one step. An exception is fatal: failures of single requests come as outputs."""
        ...

    def has_work(self) -> bool: ...

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier are worth fetching now."""
        ...

    def stats(self) -> SchedulerStats: ...

    def release_cache(self) -> None:
        """Free the KV cache and what it holds, while there is no work; none may come until `restore_cache`."""
        ...

    def restore_cache(self) -> None:
        """Replace the KV cache by an empty one, while there is no work: as large as settings and free memory allow."""
        ...
