"""A worker whose engine is a few lines of arithmetic: fast, deterministic, and able to misbehave when asked to.

The worker, its Redis side and its signals are the real ones; only the model is not. Run as a program it is a worker process::

    python -m tests.fakes --redis URL --queue Q --lease 2
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from producer.errors import ContextLengthExceeded, InvalidRequest, ModelUnavailable
from producer.keys import Tier
from producer.sampling import SamplingParams
from producer.wire import GenerateRequest, TokenLogprob
from worker.config import WorkerConfig
from worker.engine.config import EngineConfig
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import SchedulerStats
from worker.engine.step import StepOutput
from worker.reload import Reload
from worker.worker import Worker

VOCABULARY = 1000
MAX_MODEL_LEN = 100_000

KILL = "!kill"  # the step that runs it is the process's last
WEDGE = "!wedge"  # its step never ends
CRASH = "!crash"  # its step raises
FAIL = "!fail"  # its row fails, alone
UNLOADABLE = "unloadable"  # the name of a model that is not there
FOREIGN = "foreign"  # the name of a model with a vocabulary of its own
FAIL_SECOND = "!second"  # of several outputs the second one's row fails, at its fifth token


def next_token(prompt_token_ids: Sequence[int], position: int, index: int = 0) -> int:
    """The model's token at ``position`` of output ``index``: a function of only these and the prompt."""
    digest = hashlib.blake2b(f"{list(prompt_token_ids)}:{position + MAX_MODEL_LEN * index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCABULARY


def expected_tokens(prompt: str, max_tokens: int, index: int = 0) -> list[int]:
    """Output ``index`` of an undisturbed run."""
    ids = list(prompt.encode())
    return [next_token(ids, position, index) for position in range(max_tokens)]


def expected_text(prompt: str, max_tokens: int, index: int = 0) -> str:
    return "".join(map(text_of, expected_tokens(prompt, max_tokens, index)))


def text_of(token_id: int) -> str:
    return f" {token_id}"


@dataclass(frozen=True, slots=True)
class FakeDelta:
    text: str
    stopped_by: str | None
    num_tokens_kept: int


class FakeDetokenizer:
    """One piece of text per token; holds nothing back, so a stop string must not span tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop

    def push(self, token_ids: Sequence[int], finished: bool) -> FakeDelta:
        del finished
        text = ""
        for kept, token_id in enumerate(token_ids, start=1):
            for stop in self._stops:
                if stop in text_of(token_id):
                    return FakeDelta(text, stop, kept)
            text += text_of(token_id)
        return FakeDelta(text, None, len(token_ids))


class FakeInputs:
    """A request's seed is the index of its output among those that share its prompt."""

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary

    def prepare_all(self, wire_request: GenerateRequest) -> list[Request]:
        prompt = list((wire_request.prompt or "").encode()) or list(wire_request.prompt_token_ids or ())
        if not prompt:
            raise InvalidRequest("messages must be absent, this model has no chat template", field="messages")
        if wire_request.kind == "score":
            texts = [prompt + list(text.encode()) for text in wire_request.continuations or ()]
        else:
            texts = [prompt] * wire_request.params.n
        ids = [wire_request.id] if len(texts) == 1 else [f"{wire_request.id}#{i}" for i in range(len(texts))]
        max_tokens = 0 if wire_request.kind != "generate" else wire_request.params.max_tokens or 256
        params, tier, kind = wire_request.params, wire_request.tier, wire_request.kind
        requests = [Request(ids[i], text, params, max_tokens, seed=i, tier=tier, kind=kind) for i, text in enumerate(texts)]
        for request in requests:
            request.score_start = len(prompt)
        return requests

    def check_resumable(self, token_ids: Sequence[int], vocabulary: str | None) -> None:
        assert all(0 <= token_id < VOCABULARY for token_id in token_ids)
        if token_ids and vocabulary not in (None, self.vocabulary):
            raise ModelUnavailable("another model began it")


class FakeEngine:
    """One token per step for every running request. A text's score is its negative length; its embedding, its bytes' shares."""

    device_name = "cpu"
    dtype_name = "float32"
    last_step = None

    def __init__(self, model: str = "", *, max_batch_size: int = 100, step_s: float = 0.0, trace: Path | None = None) -> None:
        if model == UNLOADABLE:
            raise FileNotFoundError(f"no such model: {model}")
        self.model_name = model or "fake"
        self.config = EngineConfig(max_batch_size=max_batch_size)
        self.inputs = FakeInputs(FOREIGN if model == FOREIGN else "common")
        self.kernels: dict[str, str | bool] = {}
        self.has_cache = True
        self.step_s = step_s
        self._max_batch_size = max_batch_size
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._ended: list[StepOutput] = []
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if trace is not None else None

    def make_detokenizer(self, request: Request) -> FakeDetokenizer:
        return FakeDetokenizer(request.params)

    def add_all(self, requests: Sequence[Request]) -> None:
        if any(request.num_prompt_tokens + request.max_tokens > MAX_MODEL_LEN for request in requests):
            raise ContextLengthExceeded(f"max_tokens must leave room in the context of {MAX_MODEL_LEN} tokens", field="max_tokens")
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        assert all(other.id != request.id for other in self._waiting + self._running), "an id is in the engine once"
        if request.kind == "generate" and len(request.output_token_ids) >= request.max_tokens:
            self._ended.append(StepOutput(request, len(request.output_token_ids), [], finish_reason="length"))
        else:
            self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._waiting = [request for request in self._waiting if request.id != request_id]
        self._running = [request for request in self._running if request.id != request_id]

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def room(self, tier: Tier) -> int:
        del tier
        return max(0, self._max_batch_size + 2 - len(self._waiting) - len(self._running))

    def stats(self) -> SchedulerStats:
        used = len(self._running)
        return SchedulerStats(
            running_realtime=sum(request.tier == "realtime" for request in self._running),
            running_batch=sum(request.tier == "batch" for request in self._running),
            waiting_realtime=sum(request.tier == "realtime" for request in self._waiting),
            waiting_batch=sum(request.tier == "batch" for request in self._waiting),
            used_blocks=used,
            free_blocks=self._max_batch_size - used,
            total_blocks=self._max_batch_size,
        )

    def release_cache(self) -> None:
        assert not self.has_work()
        self.has_cache = False

    def restore_cache(self) -> None:
        assert not self.has_work()
        self.has_cache = True

    def step(self) -> list[StepOutput]:
        assert self.has_cache
        count = self._max_batch_size - len(self._running)
        for request in self._waiting[:count]:
            request.first_step_s = time.monotonic()
        self._running += self._waiting[:count]
        self._waiting = self._waiting[count:]
        time.sleep(self.step_s)
        outputs = [self._advance(request) for request in self._running]
        self._running = [output.request for output in outputs if not output.finished]
        if self._trace is not None:
            os.write(self._trace, "".join(f"{output.request.id} {output.index}\n" for output in outputs).encode())
        ended, self._ended = self._ended, []
        return ended + outputs

    def _advance(self, request: Request) -> StepOutput:
        self._misbehave(request)
        position = len(request.output_token_ids)
        if _fails(request, position):
            request.status = RequestStatus.FINISHED
            return StepOutput(request, position, [], error_code="BATCH_FAILED", error_message="the step failed")
        if request.kind != "generate":
            return _told(request)
        token = next_token(request.prompt_token_ids, position, request.seed)
        request.output_token_ids.append(token)
        done = position + 1 >= request.max_tokens
        logprobs = [TokenLogprob(token, -0.5, {token: -0.5})] if request.params.logprobs is not None else None
        return StepOutput(request, position, [token], logprobs, "length" if done else None)

    def _misbehave(self, request: Request) -> None:
        prompt = _prompt_of(request)
        if prompt.startswith(KILL):
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.startswith(WEDGE):
            time.sleep(3600)
        if prompt.startswith(CRASH):
            raise RuntimeError("device lost")


def _prompt_of(request: Request) -> str:
    """Empty if it is made of token ids."""
    return bytes(request.prompt_token_ids).decode(errors="replace") if max(request.prompt_token_ids) < 256 else ""


def _fails(request: Request, position: int) -> bool:
    prompt = _prompt_of(request)
    return prompt.startswith(FAIL) or (prompt.startswith(FAIL_SECOND) and (request.seed, position) == (1, 4))


def _told(request: Request) -> StepOutput:
    """The result of a score or an embedding."""
    text = request.prompt_token_ids[request.score_start :]
    if request.kind == "score":
        return StepOutput(request, 0, [], finish_reason="stop", score=-float(len(text)))
    return StepOutput(
        request, 0, [], finish_reason="stop", embedding=[token / sum(request.prompt_token_ids) for token in request.prompt_token_ids]
    )


def main() -> int:
    """Run a worker process until it is told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--queue", default="default")
    parser.add_argument("--name")
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--checkpoint-tokens", type=int, default=64)
    parser.add_argument("--checkpoint-seconds", type=float, default=2.0)
    parser.add_argument("--max-attempts", type=int, default=3)
    parser.add_argument("--max-batch-size", type=int, default=100)
    parser.add_argument("--fetch-ahead", type=int, default=0)
    parser.add_argument("--socket-timeout", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    names = {"name": args.name} if args.name else {}
    config = WorkerConfig(
        redis_url=args.redis,
        queue=args.queue,
        lease_s=args.lease,
        drain_s=args.drain_seconds,
        checkpoint_tokens=args.checkpoint_tokens,
        checkpoint_s=args.checkpoint_seconds,
        max_attempts=args.max_attempts,
        fetch_ahead=args.fetch_ahead,
        socket_timeout_s=args.socket_timeout,
        **names,
    )
    options = {"max_batch_size": args.max_batch_size, "step_s": args.step_ms / 1000, "trace": args.trace}
    worker = Worker(config, lambda model: FakeEngine(model, **options))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.request_stop())
    signal.signal(signal.SIGHUP, lambda *_: worker.request_reload(Reload()))
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
