"""The engine: schedule, run, update, once per step. One thread owns it and the device.

>>> from worker.engine import Engine
>>> engine = Engine.load("demo")
>>> engine.generate("The capital of France is", temperature=0.0, max_tokens=4)[0].text
' Paris.\\n\\n'
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from producer.keys import Tier
from producer.sampling import SamplingParams
from producer.wire import FinishReason, GenerateRequest, Result
from worker.engine import structured
from worker.engine.config import EngineConfig
from worker.engine.detokenizer import Detokenizer
from worker.engine.failures import Exhaustion, FatalDeviceError, as_request_error, is_fatal, is_out_of_memory, log_culprit, release_memory
from worker.engine.inputs import InputProcessor, ModelLimits
from worker.engine.long_prefixes import LongPrefixes
from worker.engine.model_loader import LoadedModel, check_tokenizer, load_model
from worker.engine.model_runner import ModelRunner
from worker.engine.offline import run_to_end
from worker.engine.request import Request, RequestStatus
from worker.engine.run_ahead import PendingStep, RunAhead
from worker.engine.scheduler import Scheduler, SchedulerStats
from worker.engine.siblings import Siblings
from worker.engine.step import Sampled, ScheduledChunk, StepOutput, StepPlan, StepStats
from worker.engine.structured import GrammarCompiler

_PAUSE_S = 0.001  # between checks of a static batch that is filling

log = structlog.get_logger("headrace.engine")


class Engine:
    """A model, its KV cache, and the requests that run on them.

    All methods belong to one thread, except `make_detokenizer`; any thread may also read `config`, `inputs` (and call its methods) and
    the names.

    Args:
        loaded: a model that is in memory already; None loads ``config.model``.

    Attributes:
        runner: the model and its KV cache.

    Raises:
        ModelUnavailable: the model cannot be loaded, or would be run wrongly.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.last_step: StepStats | None = None
        self._loaded = loaded or load_model(config)
        self.config = config.for_device(self._loaded.device.type)
        self.runner = ModelRunner(self._loaded, self.config)
        self._clock = self.runner.clock
        if loaded is None:  # a model that was given may serve others too
            self.runner.free_unused_weights()
        self.inputs = _make_inputs(self._loaded, config.seed)
        self._make_scheduler()
        self._requests: dict[str, Request] = {}
        self._ended_early: list[StepOutput] = []
        self._exhaustion = Exhaustion()
        self._pending: PendingStep | None = None
        self._idle_since_s: float | None = None
        self._offline_ids = itertools.count()

    @classmethod
    def load(cls, model: str = "demo", **settings: Any) -> Engine:
        """An engine of a model, with `EngineConfig`'s settings by name."""
        return cls(EngineConfig(model=model, **settings))

    @property
    def model_name(self) -> str:
        return self._loaded.name

    @property
    def device_name(self) -> str:
        return str(self._loaded.device)

    @property
    def dtype_name(self) -> str:
        return str(self._loaded.dtype).removeprefix("torch.")

    @property
    def kernels(self) -> Mapping[str, str | bool]:
        """What computes its steps: the fields of `kernels.Kernels`."""
        return self.runner.kernels._asdict()

    def add(self, request: Request) -> None:
        """Take a request in; one that has output already continues after it.

        Raises:
            InvalidRequest: its prompt has token ids that are not in the vocabulary.
            ContextLengthExceeded: it can never fit the context or the KV cache.
        """
        self.add_all([request])

    def add_all(self, requests: Sequence[Request]) -> None:
        """Take in the requests of one prompt (`InputProcessor.prepare_all`), which is then computed once. Raises as `add`."""
        for request in requests:
            assert request.id not in self._requests, f"{request.id} is in the engine"
            self.inputs.check_vocabulary("prompt_token_ids", request.prompt_token_ids)
        for request in requests:
            self._end_if_complete(request)
        beginning = [request for request in requests if request.status is not RequestStatus.FINISHED]
        if beginning:
            self._siblings.add(beginning)
        self._requests.update((request.id, request) for request in requests)

    def abort(self, request_id: str) -> None:
        """Forget a request; an unknown one is not an error. No output follows."""
        request = self._requests.get(request_id)
        if request is not None:
            self._ended_early = [output for output in self._ended_early if output.request is not request]
            self._end(request)
            self._collect_if_idle()

    def step(self) -> list[StepOutput]:
        """Run one step.

        Returns:
            What it did for each request that got something, including failures of single requests.

        Raises:
            FatalDeviceError: the device is lost. Any other exception is a fault of ours.
        """
        with self.runner.on_device:
            return self._step()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def room(self, tier: Tier) -> int:
        """How many further requests of a tier are worth fetching now."""
        return max(0, self._scheduler.room(tier) - self._num_held(tier))

    def stats(self) -> SchedulerStats:
        """The present counts."""
        stats, realtime, batch = self._scheduler.stats(), self._num_held("realtime"), self._num_held("batch")
        if realtime or batch:
            stats = replace(stats, waiting_realtime=stats.waiting_realtime + realtime, waiting_batch=stats.waiting_batch + batch)
        return stats

    def _num_held(self, tier: Tier) -> int:
        """Requests that wait for what another computes, before they wait for anything else."""
        return self._siblings.num_held(tier) + self._prefixes.num_held(tier)

    def release_cache(self) -> None:
        """Free the KV cache, including cached prefixes, while there is no work; none may come until `restore_cache`."""
        assert not self.has_work(), "a request would lose what it has computed"
        self._pending = None
        with self.runner.on_device:
            self.runner.release_cache()

    def restore_cache(self) -> None:
        """Replace the KV cache by an empty one, while there is no work: as large as settings and free memory allow.

        Raises:
            ModelUnavailable: there is no memory for it.
        """
        assert not self.has_work(), "a request would lose what it has computed"
        self._pending = None
        with self.runner.on_device:
            self.runner.restore_cache()
        self._make_scheduler()

    def _make_scheduler(self) -> None:
        runner = self.runner
        self._scheduler = Scheduler(
            self.config, runner.num_blocks, runner.num_cpu_blocks, self._loaded.max_model_len, costs=runner.preemption_costs
        )
        self._prefixes = LongPrefixes(self._scheduler)
        self._siblings = Siblings(self._scheduler, self._prefixes)

    def make_detokenizer(self, request: Request) -> Detokenizer:
        """A detokeniser that continues after the request's present output. Any thread may call this."""
        return Detokenizer(self._loaded.tokenizer, request.params, request.output_token_ids, request.eos_token_ids)

    def generate(
        self, prompts: str | Sequence[str | GenerateRequest], params: SamplingParams | None = None, **sampling: Any
    ) -> list[Result]:
        """Run prompts together to their end, without a queue.

        Args:
            prompts: texts, or whole requests; a single text counts as a list of one.
            params: for the texts; or its fields as keywords.

        Returns:
            One result per prompt, in order.

        Raises:
            HeadraceError: the first error of any prompt.
        """
        params = params or SamplingParams.from_keywords(sampling)
        items = [prompts] if isinstance(prompts, str) else prompts
        return run_to_end(self, [self._as_request(item, params) for item in items])

    def _as_request(self, item: str | GenerateRequest, params: SamplingParams) -> GenerateRequest:
        if isinstance(item, GenerateRequest):
            return item
        return GenerateRequest(id=f"offline-{next(self._offline_ids)}", prompt=item, params=params)

    def _end_if_complete(self, request: Request) -> None:
        """Take in the output that a request has already; if that is complete, the next step says so."""
        if request.grammar is not None:
            request.grammar.catch_up(request.output_token_ids)
        finish_reason, stop_reason = _finish_reason(request)
        if finish_reason is not None:
            output = StepOutput(request, len(request.output_token_ids), [], finish_reason=finish_reason, stop_reason=stop_reason)
            self._ended_early.append(output)
            request.move_to(RequestStatus.FINISHED)  # the scheduler never had it

    def _take_ended_early(self) -> list[StepOutput]:
        outputs, self._ended_early = self._ended_early, []
        for output in outputs:
            self._end(output.request)
        return outputs

    # A step

    def _step(self) -> list[StepOutput]:
        self._clock.start()
        outputs = self._take_ended_early()
        self._prefixes.release()
        plan = self._scheduler.schedule()
        self.runner.copy_blocks(plan)
        self._clock.lap("schedule")
        if plan.chunks:
            outputs += self._run_now(plan) if self.runner.run_ahead is None else self._run_ahead(plan, self.runner.run_ahead)
        elif self._pending is not None:
            outputs += self._collect()
        elif not outputs:
            time.sleep(min(_PAUSE_S, self._scheduler.wait_s()))
        self._collect_if_idle()
        return outputs

    def _run_now(self, plan: StepPlan) -> list[StepOutput]:
        """Run the step and wait for it."""
        start_s = time.monotonic()
        idle_s = start_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        outputs = self._run(plan)
        end_s = time.monotonic()
        self._note(plan, end_s - start_s, idle_s)
        self._idle_since_s = end_s if self._requests else None
        return outputs

    def _run(self, plan: StepPlan) -> list[StepOutput]:
        try:
            results = self.runner.run(plan)
        except Exception as error:
            return self._isolate(plan, error)
        self._scheduler.advance(plan)
        return self._update_all(plan, results)

    def _run_ahead(self, plan: StepPlan, ahead: RunAhead) -> list[StepOutput]:
        """Launch the step, and only then read the tokens of the previous one."""
        if not ahead.can_launch(plan):
            outputs = self._collect()
            rest = _unfinished(plan)
            return outputs + (self._run_now(rest) if rest.chunks else [])
        try:
            pending = ahead.launch(plan, self._pending)
        except Exception as error:
            outputs = self._collect()
            rest = _unfinished(plan)
            return outputs + (self._isolate(rest, error) if rest.chunks else [])
        outputs = self._collect()
        self._scheduler.advance(plan)
        pending.mark_unknown()
        self._pending = pending
        return outputs

    def _collect(self) -> list[StepOutput]:
        """Read the tokens of the last launched step; nothing if there is none."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        try:
            results = pending.result()
        except RuntimeError as error:  # an error after the launch has happened on the device
            raise FatalDeviceError(f"{type(error).__name__}: {error}") from error
        self._clock.lap("wait")
        outputs = self._update_all(pending.plan, results)
        self._note(pending.plan, pending.seconds, pending.idle_seconds)
        self._idle_since_s = None
        return outputs

    def _collect_if_idle(self) -> None:
        """If no request is left, read the step that was launched for none: the time until the next arrival must not count as idle."""
        if not self._requests:
            self._collect()

    def _update_all(self, plan: StepPlan, results: Sequence[Sampled | None]) -> list[StepOutput]:
        self._exhaustion.succeeded(plan)
        return [output for chunk, sampled in zip(plan.chunks, results, strict=True) if (output := self._update(chunk, sampled))]

    def _isolate(self, plan: StepPlan, error: Exception) -> list[StepOutput]:
        """Halve a failed step until the request that makes it fail is alone; only that one ends. A device without memory ends all.

        A failed step has advanced no request, and computing it again writes the same values into the KV cache.
        """
        if is_fatal(error, self._loaded.device):
            raise FatalDeviceError(f"{type(error).__name__}: {error}") from error
        log.warning("step failed", batch_size=len(plan.chunks), error=type(error).__name__)
        if is_out_of_memory(error):
            release_memory(self._loaded.device)
        if len(plan.chunks) == 1:
            log_culprit(plan.chunks[0].request.id, error)
            self._exhaustion.hit(plan, error)
            failure = as_request_error(error)
            return [self._fail(plan.chunks[0].request, failure.code, failure.message)]
        middle = len(plan.chunks) // 2
        return self._run(StepPlan(plan.chunks[:middle])) + self._run(StepPlan(plan.chunks[middle:]))

    def _update(self, chunk: ScheduledChunk, sampled: Sampled | None) -> StepOutput | None:
        """Take in one request's result of the step, and end the request if it has to end."""
        request = chunk.request
        if sampled is None or request.status is RequestStatus.FINISHED:  # ended by a result read after the step's launch
            return None
        if sampled.error_code is not None:
            self._scheduler.forget_blocks(request)
            return self._fail(request, sampled.error_code, "no token can be chosen: the model's output is not finite, or all is forbidden")
        index = len(request.output_token_ids)
        if request.kind != "generate":
            self._end(request)
            score = request.score if request.kind == "score" else None
            return StepOutput(request, index, [], finish_reason="stop", score=score, embedding=sampled.embedding)
        request.output_token_ids.append(sampled.token_id)
        if request.grammar is not None:
            request.grammar.catch_up(request.output_token_ids)
        if sampled.logprob is not None:
            request.logprobs.append(sampled.logprob)
        finish_reason, stop_reason = _finish_reason(request)
        self._siblings.computed(request)
        if finish_reason is not None:
            self._end(request)
        logprobs = None if sampled.logprob is None else [sampled.logprob]
        return StepOutput(request, index, [sampled.token_id], logprobs, finish_reason, stop_reason)

    def _fail(self, request: Request, code: str, message: str) -> StepOutput:
        self._end(request)
        return StepOutput(request, len(request.output_token_ids), [], error_code=code, error_message=message)

    def _end(self, request: Request) -> None:
        del self._requests[request.id]
        if not self._siblings.discard(request):
            self._prefixes.finish(request)
            self._siblings.ended(request)

    def _note(self, plan: StepPlan, seconds: float, idle_s: float) -> None:
        self._clock.lap("update")
        self.last_step = StepStats(seconds, idle_s, len(plan.chunks), plan.num_tokens, self._clock.take())
        self._scheduler.pace.observe(plan, seconds + idle_s)


def _finish_reason(request: Request) -> tuple[FinishReason | None, int | None]:
    """Why the request's output has ended (None if it has not), and by which stop token. EOS and stop tokens belong to the output."""
    if request.kind != "generate" or not request.output_token_ids:
        return None, None
    last = request.output_token_ids[-1]
    if last in request.eos_token_ids:
        return "stop", None
    if last in request.params.stop_token_ids:
        return "stop", last
    if request.grammar is not None and request.grammar.complete:
        return "stop", None
    return ("length" if len(request.output_token_ids) >= request.max_tokens else None), None


def _unfinished(plan: StepPlan) -> StepPlan:
    """What is left of a plan, some of whose requests may have ended since it was made. Its copies have been made already."""
    return StepPlan([chunk for chunk in plan.chunks if chunk.request.status is not RequestStatus.FINISHED])


def _make_inputs(loaded: LoadedModel, seed: int) -> InputProcessor:
    check_tokenizer(loaded.tokenizer, loaded.name)
    limits = ModelLimits(max_model_len=loaded.max_model_len, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids, seed=seed)
    grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids) if structured.is_available() else None
    return InputProcessor(loaded.tokenizer, limits, grammars)
