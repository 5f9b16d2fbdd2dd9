"""The ``headrace bench`` command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from producer.cli.environment import REPEATABLE
from producer.cli.group import INTERRUPTED
from producer.cli.output import print_json
from producer.errors import ModelUnavailable
from producer.load.plots import can_draw, draw
from worker.bench import plots, report, workloads
from worker.bench.compare import EngineSpec, Results, compare
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest, Scenario
from worker.cli import ByteSize

COMPARED = ("headrace", "queue", "static", "transformers", "transformers-static", "naive")
ENGINES = (*COMPARED, "vllm")
_WARMUP_REQUESTS = 16
_WARMUP_TOKENS = 16
_SHARED_PREFIX = "shared-prefix"  # the workload that turns prefix caches on


@click.command()
@click.option("--workload", default="mixed", show_default=True, help="mixed, decode, prefill, anyscale, shared-prefix or trace:FILE.")
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(ENGINES), help=f"Engine to run [default: headrace]; {REPEATABLE}, to compare."
)
@click.option("--compare", "compare_all", is_flag=True, help=f"{', '.join(COMPARED)}. The last ones are slow: see --count.")
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False),
    help="Python interpreter of an environment with vLLM; adds vLLM, whose own variables (VLLM_CPU_...) come from the environment.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Counted runs of each engine, in turn.")
@click.option("--count", type=click.IntRange(1), help="Only the first COUNT requests.")
@click.option(
    "--output-cap", "output_caps", multiple=True, type=click.IntRange(1), help=f"Most output tokens of a request; {REPEATABLE}, to sweep."
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    help=f"Poisson arrivals per second [default: all at once, or a trace's own times]; {REPEATABLE}, to sweep.",
)
@click.option("--callers", default=128, show_default=True, type=click.IntRange(1), help="Blocking callers of the queue engine.")
@click.option("--model", default="demo", show_default=True, help="Model folder, GGUF file, hub id, or demo.")
@click.option("--dtype", default="auto", show_default=True, help="auto: the type in which each engine is fast on this device.")
@click.option("--quantization", default="none", show_default=True, type=click.Choice(["none", "int8"]), help="Type of Headrace's weights.")
@click.option("--kv-dtype", default="auto", show_default=True, type=click.Choice(["auto", "int8"]), help="Type of Headrace's KV cache.")
@click.option("--max-batch-size", default=128, show_default=True, type=click.IntRange(1))
@click.option(
    "--max-batch-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Tokens per step; 0: by device. vLLM keeps its own default.",
)
@click.option(
    "--kv-memory",
    type=ByteSize(),
    help="Memory for the KV cache of each of headrace, queue, static, vllm [default: a tenth of the GPU's, 2GiB on a CPU].",
)
@click.option("--seed", default=0, show_default=True, help="Seed of generated workloads and arrivals.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw throughput, latency and batch size.")
def bench(
    workload: str,
    engines: tuple[str, ...],
    compare_all: bool,
    vllm_python: str | None,
    rounds: int,
    as_json: bool,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Run a workload through one or several engines, in turn, on the same requests.

    With several values of --output-cap or --rate the requests are run at each of them. If Ctrl-C, SIGTERM or a failing engine ends the
    comparison early, the finished rounds are still shown.
    """
    names = _names(engines, compare_all, vllm_python)
    if plot_path is not None and not can_draw():
        raise click.UsageError("--plot needs matplotlib, which comes with headrace[demo]")
    scenarios = _scenarios(workload, options)
    options["enable_prefix_caching"] = workload == _SHARED_PREFIX
    options["kv_memory"] = options["kv_memory"] or _default_kv_memory()
    specs = [_spec(name, options, vllm_python, scenarios) for name in names]
    console = Console(stderr=True, highlight=False)
    results, failure = _run(specs, scenarios, rounds, console)
    for name in report.served_by_reference(results):
        console.print(f"[yellow]{name}: attention runs on the slow torch reference; the log above says why[/yellow]")
    title = _title(workload, options["count"], scenarios)
    if as_json:
        ended_by = failure.message if failure else None
        print_json({"workload": workload, "ended_by": ended_by, "scenarios": report.to_json(results)}, indent=2)
    elif results:
        Console(width=None if sys.stdout.isatty() else 130).print(report.tables(title, results))
    if plot_path is not None and results:
        draw(title, plots.panels(results), plot_path)
        console.print(f"plot: {plot_path}")
    if failure is not None:
        raise failure


def _names(engines: tuple[str, ...], compare_all: bool, vllm_python: str | None) -> list[str]:
    names = [*engines, *(COMPARED if compare_all else ())] or ["headrace"]
    if vllm_python:
        names.append("vllm")
    elif "vllm" in names:
        raise click.UsageError("engine vllm needs --vllm-python")
    return list(dict.fromkeys(names))


def _scenarios(workload: str, options: Mapping[str, Any]) -> list[Scenario]:
    try:
        vocab_size = _vocab_size(options["model"])
        requests = workloads.load(workload, count=options["count"], seed=options["seed"], vocab_size=vocab_size)
    except ModelUnavailable as error:
        raise click.UsageError(error.message) from None
    except (OSError, ValueError, KeyError) as error:
        raise click.UsageError(f"workload {workload}: {error}") from None
    return workloads.scenarios(requests, _ordered(options["output_caps"]), _ordered(options["rates"]), options["seed"])


def _vocab_size(model: str) -> int:
    from worker.engine.model_loader import read_vocab_size

    return read_vocab_size(model)


def _ordered(values: Iterable[Any]) -> list[Any]:
    return sorted(set(values))


class _Interrupted(click.ClickException):
    exit_code = INTERRUPTED


def _run(
    specs: Sequence[EngineSpec], scenarios: Sequence[Scenario], rounds: int, console: Console
) -> tuple[Results, click.ClickException | None]:
    """The finished runs, and what ended the comparison early, if anything did."""
    results: dict[Scenario, dict[str, list[Run]]] = {}
    runs = compare(specs, scenarios, rounds=rounds, warmup=_warmup(scenarios[0].requests))
    with Progress(console=console, transient=True) as progress, _sigterm_interrupts(), closing(runs):
        bar = progress.add_task("", total=rounds * len(specs) * len(scenarios))
        try:
            for scenario, run in runs:
                results.setdefault(scenario, {}).setdefault(run.engine, []).append(run)
                progress.advance(bar)
                _tell(console, scenario, run)
        except RuntimeError as error:
            return results, click.ClickException(str(error))
        except KeyboardInterrupt:
            return results, _Interrupted("interrupted")
    return results, None


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """The first SIGTERM acts as Ctrl-C; later ones are ignored, since `timeout` sends two."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, before)


def _tell(console: Console, scenario: Scenario, run: Run) -> None:
    name = ", ".join(filter(None, (run.engine, scenario.label)))
    console.print(f"{name}: {run.output_tokens_per_s:.0f} output tok/s in {run.wall_s:.1f} s")


def _warmup(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    return [replace(request, max_tokens=min(request.max_tokens, _WARMUP_TOKENS), arrival_s=0.0) for request in requests[:_WARMUP_REQUESTS]]


def _title(workload: str, count: int | None, scenarios: Sequence[Scenario]) -> str:
    first = scenarios[0]
    requests = f"{'' if count is None else 'the first '}{len(first.requests)} requests"
    if workload == _SHARED_PREFIX:
        requests += ", prefix caches on"
    if len(scenarios) > 1:
        return f"{workload}: {requests}"
    return ", ".join(filter(None, (f"{workload}: {requests}", first.label, f"{first.output_tokens} output tokens")))


def _spec(name: str, options: Mapping[str, Any], vllm_python: str | None, scenarios: Sequence[Scenario]) -> EngineSpec:
    model = {key: options[key] for key in ("model", "dtype", "enable_prefix_caching")}
    ours = {key: options[key] for key in ("quantization", "kv_dtype", "max_batch_size", "max_batch_tokens")}
    ours |= model
    match name:
        case "queue":
            return EngineSpec(name, "queue", {**ours, "kv_memory": options["kv_memory"], "callers": options["callers"]})
        case "naive" | "transformers-static" | "transformers":
            mode = {"naive": "naive", "transformers-static": "static", "transformers": "continuous"}[name]
            return EngineSpec(name, "transformers", {**model, "dtype": _device_dtype(options["dtype"]), "mode": mode})
        case "vllm":
            assert vllm_python is not None
            return EngineSpec(name, "vllm", _vllm_settings(options, scenarios), vllm_python)
    policy = "static" if name == "static" else "continuous"
    return EngineSpec(name, "headrace", {**ours, "kv_memory_bytes": options["kv_memory"], "policy": policy})


def _default_kv_memory() -> int:
    """In bytes; small enough that a few engines and their weights fit on one device."""
    import torch

    from worker.engine.model_loader import choose_device

    device = choose_device("auto")
    return torch.cuda.get_device_properties(device).total_memory // 10 if device.type == "cuda" else 2 << 30


def _device_dtype(name: str) -> str:
    """The dtype that ``auto`` means for engines that compute in the device's own types."""
    from worker.engine.model_loader import choose_device, choose_dtype

    return str(choose_dtype(name, choose_device("auto"))).removeprefix("torch.")


def _vllm_settings(options: Mapping[str, Any], scenarios: Sequence[Scenario]) -> dict[str, Any]:
    from worker.engine.model_loader import local_model_path

    longest = max(len(request.prompt_token_ids) + request.max_tokens for scenario in scenarios for request in scenario.requests)
    return {
        "model": str(local_model_path(options["model"])),
        "dtype": _device_dtype(options["dtype"]),
        "max_num_seqs": options["max_batch_size"],
        "max_model_len": longest,
        "kv_cache_memory_bytes": options["kv_memory"],
        "enable_prefix_caching": options["enable_prefix_caching"],
    }


if __name__ == "__main__":
    bench()
