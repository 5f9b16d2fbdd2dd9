"""The commands that need the worker's half: ``headrace worker`` and ``headrace demo``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from producer.cli.environment import PREFIX, REPEATABLE, unknown_variables, variable
from producer.errors import HeadraceError
from worker.config import MAX_FETCH_AHEAD, WorkerConfig
from worker.engine.config import Attention, EngineConfig, KVDtype, Policy, Quantization
from worker.routing import Route

_ENGINE, _WORKER = EngineConfig(), WorkerConfig()  # the defaults

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


def _setting(defaults: EngineConfig | WorkerConfig, spelling: str, field: str = "", **attributes: Any) -> Callable[[_Command], _Command]:
    """The option for a configuration's field, with its default; ``field`` names the field if it is not spelled like the option."""
    field = field or spelling.partition("/")[0].lstrip("-").replace("-", "_")
    return click.option(spelling, field, default=getattr(defaults, field), show_default=True, **attributes)


def _options(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


memory_options = _options(
    _setting(_ENGINE, "--quantization", type=click.Choice(get_args(Quantization)), help="How linear layers store their weights."),
    _setting(_ENGINE, "--kv-dtype", type=click.Choice(get_args(KVDtype)), help="Type of the KV cache; auto: as --dtype."),
    _setting(_ENGINE, "--max-batch-size", type=click.IntRange(1), help="Most requests in one step."),
    _setting(_ENGINE, "--max-batch-tokens", type=click.IntRange(0), help="Most tokens of one step; 0: 512 on a CPU, 2048 on CUDA."),
    _setting(_ENGINE, "--block-size", type=click.IntRange(1), help="Tokens in one KV block."),
)

_model_option = _setting(_ENGINE, "--model", help="Folder, hub id, FILE.gguf, or demo (the embedded SmolLM2-135M).")
_engine_options = _options(
    _model_option,
    _setting(_ENGINE, "--device", help="auto, cpu, cuda or cuda:N."),
    _setting(_ENGINE, "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="auto: bfloat16 if that is fast."),
    memory_options,
    _setting(_ENGINE, "--max-model-len", type=click.IntRange(1), help="Context limit in tokens [default: the model's]."),
    _setting(_ENGINE, "--kv-memory", "kv_memory_bytes", type=ByteSize(), help="Memory for the KV cache, e.g. 2GiB [default: by device]."),
    _setting(_ENGINE, "--num-blocks", type=click.IntRange(1), help="Number of KV blocks, instead of --kv-memory."),
    _setting(_ENGINE, "--cpu-swap-blocks", type=click.IntRange(0), help="CPU blocks to swap preempted requests to."),
    _setting(_ENGINE, "--enable-prefix-caching/--no-enable-prefix-caching", help="Keep and share the KV blocks of equal prefixes."),
    _setting(_ENGINE, "--policy", type=click.Choice(get_args(Policy)), help="static: fill a batch and run it to its end."),
    _setting(_ENGINE, "--attention", type=click.Choice(get_args(Attention)), help="Attention kernels."),
    _setting(_ENGINE, "--realtime-reserved", type=click.FloatRange(0, 1), help="Share kept free of batch work while realtime is busy."),
    _setting(
        _ENGINE,
        "--realtime-step-ms",
        type=click.FloatRange(0),
        help="Longest step, in ms, that batch work may cause while realtime requests wait or run; without them the bound is several "
        "times looser. 0: no bound.",
    ),
    _setting(_ENGINE, "--batch-floor", type=click.FloatRange(0, 1), help="Share that batch work always keeps."),
    _setting(_ENGINE, "--batch-overcommit", type=click.FloatRange(1), help="Promise batch work up to this many times the KV blocks."),
    click.option(
        "--source-weight",
        "source_weights",
        multiple=True,
        type=SourceWeight(),
        callback=lambda _ctx, _param, pairs: dict(pairs),
        help=f"A source's share of service relative to others of its tier [default: 1 each]; {REPEATABLE}.",
    ),
    _setting(_ENGINE, "--max-wait-ms", type=click.FloatRange(0), help="How long a static batch waits to fill."),
    _setting(_ENGINE, "--seed", help="Mixed into the noise of requests without a seed."),
    _setting(_ENGINE, "--trust-remote-code", is_flag=True, help="Let a hub model run its own code."),
)

_worker_options = _options(
    _setting(_WORKER, "--redis", "redis_url", envvar="HEADRACE_REDIS", help="Where the queue is."),
    _setting(_WORKER, "--queue", envvar="HEADRACE_QUEUE", help="Queue name."),
    click.option("--name", help="Consumer name; no two live workers may share one [default: host, pid and random]."),
    _setting(_WORKER, "--lease", "lease_s", help="Seconds without renewal after which others take over."),
    _setting(_WORKER, "--drain-seconds", "drain_s", help="How long SIGTERM lets running requests continue."),
    _setting(_WORKER, "--checkpoint-tokens", help="Tokens that a crash may cost a request that is not streamed."),
    _setting(_WORKER, "--checkpoint-seconds", "checkpoint_s", help="Seconds that a crash may cost such a request."),
    _setting(_WORKER, "--fetch-ahead", type=click.IntRange(0, MAX_FETCH_AHEAD), help="Requests per tier to hold beyond what fits."),
    _setting(_WORKER, "--max-attempts", help="Attempts without new tokens until POISONED; 1 or 2: nothing is run alone first."),
    click.option("--route", "routes", multiple=True, type=RouteType(), help=f"Tier by labels: TIER:LABEL=PATTERN[,...]; {REPEATABLE}."),
    _setting(_WORKER, "--reply-ttl", "reply_ttl_s", help="Seconds that a final reply can be read."),
    _setting(_WORKER, "--state-ttl", "state_ttl_s", help="Seconds that a finished request is known."),
    _setting(_WORKER, "--log-prompts", is_flag=True, help="Log prompts and outputs, cut to 2,000 characters each, when a request ends."),
)


@click.group()
def main() -> None:
    """The worker's commands; ``headrace`` has them too."""


@main.command()
@_worker_options
@_engine_options
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics, /startupz, /healthz and /readyz here.")
@click.option("--metrics-source", "metrics_sources", multiple=True, help=f"Source to count by name in the metrics; {REPEATABLE}.")
@click.option("--step-log", type=click.Path(dir_okay=False, path_type=Path), help="Write one JSON line per step: time, batch, tokens, KV.")
@click.option("--otlp-traces-endpoint", metavar="URL", help="Send one trace per request there, as OTLP over HTTP (needs headrace[otel]).")
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", default="console" if sys.stderr.isatty() else "json", type=click.Choice(["console", "json"]))
@click.pass_context
def worker(context: click.Context, /, **options: Any) -> None:
    """Serve a queue until SIGTERM: one worker per GPU."""
    from worker.service import serve

    try:
        exit_code = serve(unknown_variables=unknown_variables(context.command, variable(PREFIX, "worker")), **options)
    except (HeadraceError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(exit_code)


@main.command()
@_model_option
@click.option("--callers", default=24, show_default=True, type=click.IntRange(1), help="Callers that block at the same time.")
@click.option("--max-batch-size", default=8, show_default=True, type=click.IntRange(1), help="Most requests in one step.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw when requests ran, and the batch size, into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print answers and figures as JSON.")
def demo(**options: Any) -> None:
    """Run an embedded Valkey, one worker with a real model, and callers that block; print the answers, then the figures."""
    from worker.demo import run_demo

    try:
        run_demo(**options)
    except HeadraceError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
