"""The commands that need the worker's half: ``headrace worker`` and ``headrace demo``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from producer.errors import HeadraceError
from worker.routing import Route

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ByteSize(click.ParamType[int]):
    """A number of bytes as people write it: ``2GiB``, ``500MB``, ``1073741824``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value), re.IGNORECASE)
        if match is None:
            self.fail("a size is a number with a unit, such as 2GiB or 500MB", param, ctx)
        return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


class RouteType(click.ParamType[Route]):
    """A rule of `worker.routing`: ``batch:source=nightly-*``."""

    name = "ROUTE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Route:
        try:
            return value if isinstance(value, Route) else Route.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SourceWeight(click.ParamType[tuple[str, float]]):
    """``SOURCE=WEIGHT``."""

    name = "SOURCE=WEIGHT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        source, _, weight = str(value).rpartition("=")
        try:
            return source, float(weight)
        except ValueError:
            self.fail("a weight is SOURCE=WEIGHT, WEIGHT a number", param, ctx)


def _options(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_engine_options = _options(
    click.option("--model", default="demo", show_default=True, help="Folder, hub id, FILE.gguf, or demo (the embedded SmolLM2-135M)."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16", "float16"])),
    click.option(
        "--quantization", default="none", show_default=True, type=click.Choice(["none", "int8"]), help="How linear layers store weights."
    ),
    click.option(
        "--kv-dtype", default="auto", show_default=True, type=click.Choice(["auto", "int8"]), help="Of the KV cache; auto: as --dtype."
    ),
    click.option("--max-batch-size", default=100, show_default=True, type=click.IntRange(1), help="Most requests in one step."),
    click.option("--max-batch-tokens", default=512, show_default=True, type=click.IntRange(1), help="Most tokens computed in one step."),
    click.option("--max-model-len", type=click.IntRange(1), help="Context limit in tokens [default: the model's]."),
    click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens in one KV block."),
    click.option("--kv-memory", "kv_memory_bytes", type=ByteSize(), help="Memory for the KV cache, e.g. 2GiB [default: by device]."),
    click.option("--num-blocks", type=click.IntRange(1), help="KV blocks, instead of --kv-memory."),
    click.option(
        "--cpu-swap-blocks", default=0, show_default=True, type=click.IntRange(0), help="CPU blocks to swap preempted requests to."
    ),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True),
    click.option("--policy", default="continuous", show_default=True, type=click.Choice(["continuous", "static"])),
    click.option(
        "--attention", default="auto", show_default=True, type=click.Choice(["auto", "torch", "flashinfer"]), help="Attention kernels."
    ),
    click.option("--realtime-reserved", default=0.5, show_default=True, type=click.FloatRange(0, 1), help="Share kept free of batch work."),
    click.option(
        "--realtime-step-ms",
        default=50.0,
        show_default=True,
        type=click.FloatRange(0),
        help="How long batch work may make a step while realtime requests wait or run, and loosely otherwise; 0: no bound.",
    ),
    click.option("--batch-floor", default=0.1, show_default=True, type=click.FloatRange(0, 1), help="Share that batch work always keeps."),
    click.option(
        "--batch-overcommit", default=1.5, show_default=True, type=click.FloatRange(1), help="How far batch may overcommit blocks."
    ),
    click.option(
        "--source-weight",
        "source_weights",
        multiple=True,
        type=SourceWeight(),
        callback=lambda _ctx, _param, pairs: dict(pairs),
        help="Share of service of a source against others of its tier [default: 1 each]; repeatable.",
    ),
    click.option("--max-wait-ms", default=50.0, show_default=True, type=click.FloatRange(0), help="How long a static batch waits to fill."),
    click.option("--seed", default=0, show_default=True, help="Mixed into the noise of requests without a seed."),
    click.option("--trust-remote-code", is_flag=True, help="Let a hub model run its own code."),
)

_worker_options = _options(
    click.option("--redis", "redis_url", envvar="HEADRACE_REDIS", default="redis://127.0.0.1:6379/0", show_default=True),
    click.option("--queue", envvar="HEADRACE_QUEUE", default="default", show_default=True),
    click.option("--name", help="Consumer name; no two live workers may share one [default: host, pid and chance]."),
    click.option("--lease", "lease_s", default=30.0, show_default=True, help="Seconds without renewal after which others take over."),
    click.option("--drain-seconds", "drain_s", default=30.0, show_default=True, help="How long SIGTERM lets running requests go on."),
    click.option("--checkpoint-tokens", default=64, show_default=True, help="Tokens that a crash may cost a request nobody streams."),
    click.option(
        "--checkpoint-seconds", "checkpoint_s", default=2.0, show_default=True, help="Seconds that a crash may cost such a request."
    ),
    click.option("--fetch-ahead", default=0, show_default=True, type=click.IntRange(0, 100_000), help="Requests a tier to hold waiting."),
    click.option("--max-attempts", default=3, show_default=True, help="Deliveries after which a request is given up as POISONED."),
    click.option("--route", "routes", multiple=True, type=RouteType(), help="Tier by labels: TIER:LABEL=PATTERN[,...]; repeatable."),
    click.option("--reply-ttl", "reply_ttl_s", default=3600.0, show_default=True, help="Seconds that a final reply can be read."),
    click.option("--state-ttl", "state_ttl_s", default=86400.0, show_default=True, help="Seconds that a finished request is known."),
    click.option("--log-prompts", is_flag=True, help="Log prompts and outputs, cut to 2,000 characters each, with each request's end."),
)


@click.group()
def main() -> None:
    """The worker's commands; ``headrace`` has them too."""


@main.command()
@_worker_options
@_engine_options
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics, /startupz, /healthz and /readyz here.")
@click.option("--metrics-source", "metrics_sources", multiple=True, help="Source that is counted by name; may be repeated.")
@click.option("--step-log", type=click.Path(dir_okay=False, path_type=Path), help="Write a JSON line a step: time, batch size, tokens, KV.")
@click.option("--otlp-traces-endpoint", metavar="URL", help="Send a trace a request there, as OTLP over HTTP (needs headrace[otel]).")
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", default="console" if sys.stderr.isatty() else "json", type=click.Choice(["console", "json"]))
def worker(**options: Any) -> None:
    """Serve a queue: one worker a GPU, until SIGTERM."""
    from worker.service import serve

    try:
        exit_code = serve(**options)
    except (HeadraceError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(exit_code)


@main.command()
@click.option("--model", default="demo", show_default=True, help="Folder, hub id, FILE.gguf, or demo (the embedded SmolLM2-135M).")
@click.option("--callers", default=24, show_default=True, type=click.IntRange(1), help="Callers that block at the same time.")
@click.option("--max-batch-size", default=8, show_default=True, type=click.IntRange(1), help="Most requests in one step.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw who ran when, and the batch size, into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print answers and figures as JSON.")
def demo(**options: Any) -> None:
    """Embedded Valkey, one worker, a real model, and callers that block; prints the answers, then the figures."""
    from worker.demo import run_demo

    try:
        run_demo(**options)
    except HeadraceError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
