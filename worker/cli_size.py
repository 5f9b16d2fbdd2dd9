"""``headrace size``: what fits on a device, without having it."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from producer.cli.output import print_json
from producer.errors import HeadraceError
from worker.cli import ByteSize, memory_options
from worker.engine.config import EngineConfig
from worker.sizing import DTYPE_BYTES, GIB, ModelShape, Sizing, read_shape
from worker.sizing import size as compute


@click.command()
@click.option("--model", required=True, help="Folder, hub id, FILE.gguf, or demo.")
@click.option("--gpu-memory", "memory_bytes", required=True, type=ByteSize(), help="The device's memory, e.g. 80GiB.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(sorted(DTYPE_BYTES)))
@memory_options
@click.option("--trust-remote-code", is_flag=True, help="Let a hub model run its own code.")
@click.option("--json", "as_json", is_flag=True, help="Print bytes and counts as JSON.")
def size(
    model: str,
    memory_bytes: int,
    dtype: str,
    quantization: str,
    kv_dtype: str,
    max_batch_size: int,
    max_batch_tokens: int,
    block_size: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Say how a GPU's memory would be used, and how many requests of which length run at once."""
    try:
        config = EngineConfig(max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens).for_device("cuda")
        shape = read_shape(model, int8_weights=quantization == "int8", trust_remote_code=trust_remote_code)
        sizing = compute(
            shape,
            memory_bytes,
            dtype_bytes=DTYPE_BYTES[dtype],
            int8_cache=kv_dtype == "int8",
            max_batch_size=max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            block_size=block_size,
        )
    except (HeadraceError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json({"model": asdict(shape), **asdict(sizing)})
    else:
        _print(model, dtype, shape, sizing)


def _print(model: str, dtype: str, shape: ModelShape, sizing: Sizing) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(model)}[/bold] in {dtype}, {_gib(sizing.memory_bytes)} of memory\n", soft_wrap=True)
    console.print(_memory_table(shape, sizing))
    console.print(_concurrency_table(sizing))


def _memory_table(shape: ModelShape, sizing: Sizing) -> Table:
    table = Table("", "", "", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"
    table.add_row("weights", _gib(sizing.weight_bytes), f"{shape.num_parameters:,} parameters")
    table.add_row("CUDA context", _gib(sizing.context_bytes), "")
    table.add_row("KV cache", _gib(sizing.kv_bytes), f"{sizing.num_tokens:,} tokens of {sizing.kv_bytes_per_token / 1024:,.1f} KiB")
    table.add_row("", "", f"{sizing.num_blocks:,} blocks: --num-blocks {sizing.num_blocks}")
    table.add_row("left for steps", _gib(sizing.left_bytes), f"a full step needs {_gib(sizing.step_bytes)}")
    return table


def _concurrency_table(sizing: Sizing) -> Table:
    table = Table("prompt + output, tokens", "requests at once", title="\nat full length", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for length, requests in sizing.concurrency.items():
        table.add_row(f"{length:,}", f"{requests:,}")
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
