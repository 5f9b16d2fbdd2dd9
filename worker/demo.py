"""``headrace demo``: the main job on one machine. Embedded Valkey, one worker, a real model, callers that block."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from producer.cli.output import print_json
from producer.client import Client
from producer.load.stats import percentile
from producer.wire import Result
from worker.embedded import embedded_queue

# A question and the most tokens of its answer: short beside long, so that some leave while others continue.
QUESTIONS: tuple[tuple[str, int], ...] = (
    ("What is the capital of France?", 16),
    ("Write a short story about a river and a mill.", 160),
    ("What is the capital of England?", 16),
    ("Explain what a queue is in computing.", 96),
    ("What is 2 + 2?", 16),
    ("Describe how bread is made, step by step.", 200),
    ("What is the capital of Japan?", 16),
    ("Why is the sky blue?", 96),
    ("Name three primary colors.", 32),
    ("Write a poem about water.", 128),
    ("What is the chemical symbol for water?", 24),
    ("Explain photosynthesis to a child.", 128),
    ("What is the opposite of hot?", 12),
    ("Give me tips for learning to code.", 160),
    ("How many days are in a week?", 24),
    ("Describe a sunny day.", 64),
    ("What is the capital of China?", 16),
    ("How does a bicycle stay upright?", 96),
    ("What is the capital of Egypt?", 24),
    ("How many legs does a spider have?", 32),
    ("Explain gravity in two sentences.", 64),
    ("What is the capital of Germany?", 16),
    ("What is the capital of Greece?", 24),
    ("Tell me about the ocean.", 96),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One caller's question, its answer, and when it was sent and came, in Unix time."""

    question: str
    result: Result
    sent_s: float
    answered_s: float


def run_demo(*, model: str, callers: int, max_batch_size: int, plot: Path | None, as_json: bool) -> None:
    """Answer `QUESTIONS` through a queue of its own, and print answers and figures."""
    console = Console(stderr=as_json, highlight=False)
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        step_log = Path(folder, "steps.jsonl")
        console.print("[dim]starting Valkey and one worker (the first start converts the model, a minute at most) ...[/dim]")
        options = ["--model", model, "--max-batch-size", str(max_batch_size), "--step-log", str(step_log), "--log-level", "warning"]
        with embedded_queue(*options) as queue, queue.client() as client:
            console.print(f"[dim]{callers} callers block on {len(QUESTIONS)} questions; the batch holds {max_batch_size}[/dim]\n")
            started_s = time.time()
            answers = _ask_all(client, callers, lambda answer: _print_answer(console, answer, started_s))
            wall_s = time.time() - started_s
        steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    figures = _figures(answers, steps, wall_s)
    if as_json:
        print_json({"answers": [_as_json(answer) for answer in answers], **figures})
    else:
        console.print(_figures_table(figures))
    if plot is not None:
        _draw(plot, answers, steps, started_s)
        console.print(f"batch size over time: {plot}")


def _ask_all(client: Client, callers: int, on_answer: Callable[[Answer], None]) -> list[Answer]:
    printing = threading.Lock()

    def ask(question: tuple[str, int]) -> Answer:
        text, max_tokens = question
        sent_s = time.time()
        messages = [{"role": "user", "content": text}]
        result = client.submit_and_wait(messages=messages, max_tokens=max_tokens, temperature=0.0, timeout=600.0)
        answer = Answer(text, result, sent_s, time.time())
        with printing:
            on_answer(answer)
        return answer

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(ask, QUESTIONS))


def _print_answer(console: Console, answer: Answer, started_s: float) -> None:
    usage = answer.result.usage
    console.print(f"[bold]{answer.question}[/bold] [dim]{answer.answered_s - started_s:.1f} s, {usage.completion_tokens} tokens[/dim]")
    console.print(f"  {' '.join(answer.result.text.split())}", markup=False)


def _figures(answers: Sequence[Answer], steps: Sequence[dict[str, Any]], wall_s: float) -> dict[str, float]:
    tokens = sum(answer.result.usage.completion_tokens for answer in answers)
    first_ms = [answer.result.timings.ttft_ms for answer in answers]
    sizes = [step["batch_size"] for step in steps]
    return {
        "requests": len(answers),
        "output_tokens": tokens,
        "wall_s": round(wall_s, 2),
        "output_tokens_per_s": round(tokens / wall_s, 1),
        "ttft_ms_p50": round(percentile(first_ms, 50), 1),
        "ttft_ms_p95": round(percentile(first_ms, 95), 1),
        "steps": len(steps),
        "batch_size_mean": round(sum(sizes) / max(1, len(sizes)), 1),
        "batch_size_max": max(sizes, default=0),
    }


def _figures_table(figures: dict[str, float]) -> Table:
    table = Table(show_header=False, box=None, title="\nfigures", title_justify="left")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    return table


def _as_json(answer: Answer) -> dict[str, Any]:
    return {"question": answer.question, "text": answer.result.text, "sent_s": answer.sent_s, "answered_s": answer.answered_s}


def _draw(path: Path, answers: Sequence[Answer], steps: Sequence[dict[str, Any]], started_s: float) -> None:
    """Above: one bar per request, pale while it queues, coloured from first token to last. Below: the batch size, one point per step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    bars, batch = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for row, answer in enumerate(answers):
        sent_s = answer.sent_s - started_s
        first_s = sent_s + answer.result.timings.ttft_ms / 1000
        bars.barh(row, first_s - sent_s, left=sent_s, color="lightgrey")
        bars.barh(row, answer.answered_s - started_s - first_s, left=first_s, color="tab:blue")
    bars.set_yticks(range(len(answers)), [answer.question for answer in answers], fontsize=7)
    bars.invert_yaxis()
    bars.set_title("short requests leave, new ones enter (grey: waiting, blue: first token to last)")
    batch.step([step["time_s"] - started_s for step in steps], [step["batch_size"] for step in steps], where="post")
    batch.set(xlabel="seconds", ylabel="batch size", ylim=(0, None))
    figure.savefig(path, dpi=110)
