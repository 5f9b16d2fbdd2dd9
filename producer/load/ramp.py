"""``ramp``: more callers step by step, and how many of them keep the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from producer.aio import AsyncClient
from producer.load.callers import Callers, LoadCall, Shape, phase_figures
from producer.load.report import Check, Panel, Report, Scale, Series, all_answered

COLUMNS = ("callers", "requests", "req/s", "tokens/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "E2E p50 ms", "p95")
_FIGURES = (
    "requests",
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p95",
    "itl_ms_p50",
    "itl_ms_p95",
    "e2e_ms_p50",
    "e2e_ms_p95",
)


@dataclass(frozen=True, slots=True)
class Goals:
    """What 95 of 100 requests, or tokens, must keep."""

    ttft_ms: float
    itl_ms: float

    def kept(self, figures: dict[str, float]) -> bool:
        return not figures["failed"] and figures["ttft_ms_p95"] <= self.ttft_ms and figures["itl_ms_p95"] <= self.itl_ms

    def __str__(self) -> str:
        return f"TTFT p95 <= {self.ttft_ms:g} ms and ITL p95 <= {self.itl_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Step:
    callers: int
    figures: dict[str, float]

    @property
    def row(self) -> list[float]:
        return [self.callers, *(self.figures[name] for name in _FIGURES)]


async def ramp(
    client: AsyncClient,
    *,
    steps: Sequence[int],
    seconds: float,
    shape: Shape,
    goals: Goals,
    timeout_s: float,
    on_step: Callable[[Step], None],
) -> Report:
    """Closed loops of streaming callers, ``seconds`` per step; the next begins when the requests of the last are answered."""
    callers = Callers(client, timeout_s=timeout_s)
    calls: list[LoadCall] = []
    done: list[Step] = []
    await callers.call(shape)  # a first request may have to wait for what is made on demand
    for count in steps:
        start_s = callers.now_s()
        made = await callers.closed_loop(shape, count, callers.for_s(seconds))
        calls += made
        done.append(Step(count, phase_figures(made, start_s, seconds)))
        on_step(done[-1])
    return _report(done, calls, shape, goals)


def capacity(steps: Sequence[Step], goals: Goals) -> Step | None:
    """The last of the leading steps that keep the goals; None if the first does not."""
    best = None
    for step in steps:
        if not goals.kept(step.figures):
            break
        best = step
    return best


def _report(steps: Sequence[Step], calls: Sequence[LoadCall], shape: Shape, goals: Goals) -> Report:
    best = capacity(steps, goals)
    kept = Check("the first step keeps the goals", best is not None, str(goals))
    return Report(
        "ramp",
        f"streaming callers, about {shape.prompt_tokens} tokens in, {shape.output_tokens} out",
        COLUMNS,
        [step.row for step in steps],
        [all_answered(calls), kept],
        _panels(steps, goals),
        hint(best, steps, goals),
    )


def hint(best: Step | None, steps: Sequence[Step], goals: Goals) -> str:
    """The capacity in words."""
    if best is None:
        return f"capacity: none, not even {steps[0].callers} callers keep {goals}"
    figures = best.figures
    more = ", the most that was tried" if best is steps[-1] else ""
    rate = f"{figures['requests_per_s']:.2f} requests/s and {figures['output_tokens_per_s']:.0f} tokens/s"
    return f"capacity: {best.callers} callers at once{more} ({rate}) keep {goals}"


def _panels(steps: Sequence[Step], goals: Goals) -> list[Panel]:
    counts = [step.callers for step in steps]

    def course(label: str, name: str) -> Series:
        return Series(label, counts, [step.figures[name] for step in steps])

    def latency(title: str, name: str, goal: float, scale: Scale = "linear") -> Panel:
        series = [course("p50", f"{name}_p50"), course("p95", f"{name}_p95")]
        return Panel(title, "callers", "ms", series, goals={f"goal {goal:g} ms": goal}, x_scale="steps", y_scale=scale)

    return [
        Panel("throughput", "callers", "output tokens/s", [course("tokens/s", "output_tokens_per_s")], x_scale="steps"),
        latency("time to first token", "ttft_ms", goals.ttft_ms, "log"),
        latency("between tokens", "itl_ms", goals.itl_ms),
    ]
