"""What the worker asks of an engine. `worker.engine.engine.Engine` is one; so is anything that a test puts in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from producer.keys import Tier
from producer.wire import GenerateRequest
from worker.engine.request import Request
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepOutput, StepStats


class TextDelta(Protocol):
    """What pushing tokens added to a request's text: see `worker.engine.detokenizer`."""

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
        """Tokenise and check. Several, where the reply is to hold several outputs or scores, have ids of their own.

        Raises a `producer.errors.HeadraceError` that names the field.
        """
        ...

    def check_resumable(self, token_ids: Sequence[int]) -> None:
        """Raises `ModelUnavailable` where the model cannot go on from such output."""
        ...


class EngineLimits(Protocol):
    """What an engine was told about its size and its callers: see `worker.engine.config`."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def source_weights(self) -> Mapping[str, float]: ...


class EngineLike(Protocol):
    """An engine. Its own thread calls all but `config`, `inputs`, `make_detokenizer` and the names; other threads call these."""

    @property
    def model_name(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def kernels(self) -> Mapping[str, str | bool]:
        """What serves its steps, by names of its own; for the log."""
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
        """Take in what `InputProcessor.prepare_all` made of one request: all, or, raising `ContextLengthExceeded`, none."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; one that is not there is no error. No output follows."""
        ...

    def step(self) -> list[StepOutput]:
        """Run one step. What it raises is fatal: failures of single requests come as outputs."""
        ...

    def has_work(self) -> bool: ...

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier are worth fetching now."""
        ...

    def stats(self) -> SchedulerStats: ...

    def release_cache(self) -> None:
        """Give back the memory of the KV cache, with what it holds, while there is no work; none may come until `restore_cache`."""
        ...

    def restore_cache(self) -> None:
        """Make an empty KV cache in the place of the one there is, while there is no work: as large as settings and free memory allow."""
        ...
