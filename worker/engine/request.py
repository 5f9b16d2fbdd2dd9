"""A request in the engine. Neither torch nor redis."""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from producer.errors import ContextLengthExceeded
from producer.keys import Tier
from producer.sampling import SamplingParams
from producer.wire import Kind, TokenLogprob

if TYPE_CHECKING:
    from worker.engine.fairness import SourceAccount

UNKNOWN_TOKEN = -1  # last of the output: sampled, but not yet read from the device (`run_ahead`)


class RequestStatus(enum.Enum):
    """The states of a request; `Request.move_to` guards the transitions."""

    WAITING = "waiting"  # owns no blocks except those of a shared prefix
    RUNNING = "running"  # in the batch
    PREEMPTED = "preempted"  # preempted, to be recomputed: owns no blocks
    SWAPPED = "swapped"  # preempted, its blocks are in CPU memory
    FINISHED = "finished"  # owns nothing


_NEXT: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.SWAPPED: frozenset({RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens to be computed.

    A request owes ``num_tokens - num_computed_tokens`` tokens of computation. A step that computes
    the last one owed samples the next. ``output_token_ids`` may be non-empty from the start: a
    resumed request has what was already generated.

    Attributes:
        id: unique within the engine.
        seed: of the sampling noise, always set here (`SamplingParams.seed` may be None).
        max_tokens: most output tokens, including resumed ones, resolved against the context length.
        arrival: order of arrival, smaller is earlier; kept through preemption and resume.
        deadline_at_s: monotonic, or None; orders the waiting queue of a tier (earliest first).
        eos_token_ids: the model's stop tokens, empty with ``ignore_eos``.
        first_step_s: monotonic; when its first step was planned, None before.
        num_cached_tokens: how many prompt tokens came from the prefix cache when it was first admitted.
        block_ids: the block table, in order; entry i holds positions ``i*block_size ...``.
        score_start: kind ``score``: the position of the first token whose log-probability is summed into ``score``.
        pooled: kind ``embed``: the running pool of hidden states; only for the model runner.
        grammar: the state of a structured output; only for the sampler.
        token_counts: what the penalties count; only for the sampler.
        sort_key: order within its tier: deadline, arrival, order of `Scheduler.add`. This and the following are only for the scheduler.
        max_blocks: blocks that ``max_kv_tokens`` take.
        guaranteed: promised all of its blocks, so never preempted; the others are best effort.
        block_keys: prefix key of each full block, as far as known.
        num_indexed_blocks: how many leading blocks are in the prefix index, where ``prefix_node`` names them.
        account: its source's service.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    tier: Tier = "realtime"
    kind: Kind = "generate"
    arrival: int = 0
    deadline_at_s: float | None = None
    source: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    first_step_s: float | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    cpu_block_ids: list[int] = field(default_factory=list)
    score_start: int = 0
    score: float = 0.0
    pooled: Any = None
    grammar: Any = None
    token_counts: Any = None
    sort_key: tuple[float, int, int] = (math.inf, 0, 0)
    max_blocks: int = 0
    guaranteed: bool = False
    block_keys: list[bytes] = field(default_factory=list)
    num_indexed_blocks: int = 0
    prefix_node: int = 0
    account: SourceAccount[Request] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_owed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Positions it can ever need in the KV cache (the last sampled token is never computed)."""
        return len(self.prompt_token_ids) + max(self.max_tokens, 1) - 1

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache; tokens that the step itself must compute may not."""
        if self.kind == "embed":
            return 0
        return max(self.score_start - 1, 0) if self.kind == "score" else self.num_tokens - 1

    def forget_computation(self) -> None:
        """Start over: all tokens are owed again. Output tokens stay."""
        self.num_computed_tokens = 0
        self.score = 0.0
        self.pooled = None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions ``start..stop-1`` of prompt + output."""
        n = len(self.prompt_token_ids)
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; a transition that does not exist is our bug."""
        assert status in _NEXT[self.status], f"{self.id}: {self.status.name} -> {status.name}"
        self.status = status


def check_fits(request: Request, max_model_len: int, num_slots: int = sys.maxsize) -> None:
    """Refuse a request that can never be computed.

    Args:
        max_model_len: context limit in tokens, prompt and output together.
        num_slots: tokens that fit the whole KV cache.

    Raises:
        ContextLengthExceeded: names the limit, and the field that exceeds it.
    """
    num_prompt, max_tokens = request.num_prompt_tokens, request.max_tokens
    for needed, limit, what in ((num_prompt + max_tokens, max_model_len, "context"), (request.max_kv_tokens, num_slots, "KV cache")):
        if needed > limit:
            message = f"prompt ({num_prompt} tokens) plus max_tokens ({max_tokens}) exceeds the {what} of {limit} tokens"
            raise ContextLengthExceeded(message, request_id=request.id, field="prompt" if num_prompt >= limit else "max_tokens")
