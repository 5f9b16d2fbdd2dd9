"""The ``headrace bench`` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from worker.bench import report, workloads
from worker.bench.compare import EngineSpec, compare
from worker.bench.records import Run
from worker.bench.workloads import BenchRequest

ENGINES = ("headrace", "queue", "static", "transformers", "transformers-static", "naive", "vllm")
_WARMUP_REQUESTS = 16
_WARMUP_TOKENS = 16


@click.command()
@click.option("--workload", default="mixed", show_default=True, help="mixed, decode, prefill, anyscale, shared-prefix or trace:FILE.")
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(ENGINES), help="Engine to run; repeat to compare [default: headrace]."
)
@click.option("--compare", "compare_all", is_flag=True, help="headrace, queue, static, transformers and transformers-static, in turn.")
@click.option(
    "--vllm-python", type=click.Path(exists=True, dir_okay=False), help="Python interpreter of an environment with vLLM; joins vLLM."
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Counted runs of each engine, in turn.")
@click.option("--count", type=click.IntRange(1), help="Only the first COUNT requests.")
@click.option("--output-cap", type=click.IntRange(1), help="Most output tokens of a request.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Poisson arrivals a second [default: all at once].")
@click.option("--callers", default=128, show_default=True, type=click.IntRange(1), help="Blocking callers of the queue engine.")
@click.option("--model", default="demo", show_default=True, help="Model folder, GGUF file, hub id, or demo.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--quantization", default="none", show_default=True, type=click.Choice(["none", "int8"]), help="Of Headrace's weights.")
@click.option("--max-batch-size", default=128, show_default=True, type=click.IntRange(1))
@click.option("--max-batch-tokens", default=512, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, help="Of generated workloads and arrivals.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw throughput, latency and batch size.")
def bench(
    workload: str,
    engines: tuple[str, ...],
    compare_all: bool,
    vllm_python: str | None,
    as_json: bool,
    plot_path: Path | None,
    rounds: int,
    **options: Any,
) -> None:
    """Run a workload through one engine or several, in turn, on the same requests."""
    names = _names(engines, compare_all, vllm_python)
    requests = _requests(workload, options)
    specs = [_spec(name, options, vllm_python) for name in names]
    warmup = [
        replace(request, max_tokens=min(request.max_tokens, _WARMUP_TOKENS), arrival_s=0.0) for request in requests[:_WARMUP_REQUESTS]
    ]
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=rounds * len(specs))

        def on_run(run: Run) -> None:
            progress.advance(bar)
            console.print(f"{run.engine}: {run.output_tokens_per_s:.0f} output tok/s in {run.wall_s:.1f} s")

        runs = compare(specs, requests, rounds=rounds, warmup=warmup, on_run=on_run)
    title = f"{workload}: {len(requests)} requests, {sum(r.max_tokens for r in requests)} output tokens"
    if as_json:
        click.echo(json.dumps({"workload": workload, "requests": len(requests), "engines": report.to_json(runs)}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(report.table(title, runs))
    if plot_path is not None:
        report.plot(plot_path, title, runs)
        console.print(f"plot: {plot_path}")


def _names(engines: tuple[str, ...], compare_all: bool, vllm_python: str | None) -> list[str]:
    names = list(engines)
    if compare_all:
        names += ["headrace", "queue", "static", "transformers", "transformers-static"]
    if vllm_python:
        names.append("vllm")
    elif "vllm" in names:
        raise click.UsageError("engine vllm needs --vllm-python")
    return list(dict.fromkeys(names)) or ["headrace"]


def _requests(workload: str, options: Mapping[str, Any]) -> list[BenchRequest]:
    try:
        requests = workloads.load(workload, count=options["count"], output_cap=options["output_cap"], seed=options["seed"])
    except (OSError, ValueError, KeyError) as error:
        raise click.UsageError(f"workload {workload}: {error}") from None
    return workloads.poisson(requests, options["rate"], options["seed"]) if options["rate"] else requests


def _spec(name: str, options: Mapping[str, Any], vllm_python: str | None) -> EngineSpec:
    model = {key: options[key] for key in ("model", "dtype")}
    ours = {key: options[key] for key in ("quantization", "max_batch_size", "max_batch_tokens")}
    ours |= model | {"enable_prefix_caching": False}
    match name:
        case "queue":
            return EngineSpec(name, "queue", {**ours, "callers": options["callers"]})
        case "static":
            return EngineSpec(name, "headrace", {**ours, "policy": "static"})
        case "naive" | "transformers-static" | "transformers":
            mode = {"naive": "naive", "transformers-static": "static", "transformers": "continuous"}[name]
            return EngineSpec(name, "transformers", {**model, "mode": mode})
        case "vllm":
            assert vllm_python is not None
            return _vllm_spec(vllm_python, options)
    return EngineSpec(name, "headrace", ours)


def _vllm_spec(python: str, options: Mapping[str, Any]) -> EngineSpec:
    from worker.engine.model_loader import local_model_path

    settings = {
        "model": str(local_model_path(options["model"])),
        "dtype": options["dtype"],
        "max_num_seqs": options["max_batch_size"],
        "enable_prefix_caching": False,
        "max_model_len": 2048,
    }
    return EngineSpec("vllm", "vllm", settings, python, {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    bench()
