"""Times paged attention on a CUDA device: ours beside FlashInfer, FlashAttention and torch's SDPA, if installed.

    python -m ops.bench.gpu_attention [--shape llama-8b] [--sweep] [--json out.jsonl]

Times are medians over graph replays, with the L2 cache cleared between them: device time, without launches. The floor beside them is
the time for moving the bytes and computing at the rates of a copy and a matrix product on this device, which are measured first.
SDPA gets keys and values already gathered, which a server would have to do. A provider that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from triton.testing import do_bench

from tests.paged_attention import Case, Step, make_step
from worker.engine.arithmetic import ceil_div
from worker.engine.attention import flashinfer_backend, triton_backend
from worker.engine.cuda_graphs import CudaGraphRecorder

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "value_dim": 64},
    "llama-8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128},
    "gemma-9b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "value_dim": 256},
}
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "1 decode at 1k": ([1], [1024]),
    "1 decode at 100k": ([1], [100_000]),
    "16 decodes at 4k": ([1] * 16, [4096] * 16),
    "100 decodes at 1k": ([1] * 100, [1024] * 100),
    "99 decodes at 512, 1 at 64k": ([1] * 100, [512] * 99 + [65_536]),
    "chunk of 512 at 512": ([512], [512]),
    "chunk of 512 at 32k": ([512], [32_768]),
    "8 chunks of 1k": ([1024] * 8, [1024] * 8),
    "64 decodes at 1k, chunk of 448 at 2k": ([1] * 64 + [448], [1024] * 64 + [2048]),
}
LINE = "{:13} {:37} {:36} {:>9} {:>9} {:>9}"
Run = Callable[[], object]
Make = Callable[[], Run]
"""Prepares what is timed; either may raise."""


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of this device.

    Attributes:
        bytes_per_s: of a large copy, bytes read plus bytes written.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        ms: None if the provider failed; ``error`` then says how.
        floor_ms: the larger of the times for its bytes and its operations.
    """

    shape: str
    batch: str
    provider: str
    ms: float | None
    floor_ms: float
    error: str = ""

    def __str__(self) -> str:
        figures = ("-", f"{self.floor_ms:.4f}", self.error) if self.ms is None else self._figures(self.ms)
        return LINE.format(self.shape, self.batch, self.provider, *figures)

    def _figures(self, ms: float) -> tuple[str, str, str]:
        return f"{ms:.4f}", f"{self.floor_ms:.4f}", f"{ms / self.floor_ms:.2f}"


def main() -> None:
    arguments = _parse()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, matrix product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s\n")
    print(LINE.format("shape", "batch", "provider", "ms", "floor", "ms/floor"))
    with ExitStack() as stack:
        file = stack.enter_context(arguments.json.open("w")) if arguments.json else None
        _write(file, {"device": name, "ceilings": asdict(ceilings)})
        for shape, batch in itertools.product(arguments.shape or SHAPES, BATCHES):
            for row in measure(shape, batch, ceilings, sweep=arguments.sweep):
                print(row, flush=True)
                _write(file, asdict(row))


def _write(file: IO[str] | None, line: dict[str, Any]) -> None:
    """Write a JSON line at once, so that a later failure loses nothing."""
    if file is not None:
        print(json.dumps(line), file=file, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; may be repeated")
    parser.add_argument("--sweep", action="store_true", help="also time our kernels with other tiles")
    parser.add_argument("--json", type=Path, help="write one JSON line per row to this file")
    return parser.parse_args()


def measure_ceilings() -> Ceilings:
    """Copy 4 GB; multiply 8192 x 8192 x 8192, on random numbers."""
    source = torch.randint(255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _median_ms(lambda: target.copy_(source)) / 1e3
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = _median_ms(lambda: a @ b) / 1e3
    return Ceilings(2 * source.numel() / copy_s, 2 * size**3 / product_s)


def measure(shape: str, batch: str, ceilings: Ceilings, *, sweep: bool) -> Iterator[Row]:
    """All providers on one batch."""
    query_lens, seq_lens = BATCHES[batch]
    case = Case(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), **SHAPES[shape])
    step = make_step(case, torch.bfloat16, "cuda")
    _, key, value, k_cache, v_cache, meta = step.arguments
    triton_backend.write_kv(key, value, k_cache, v_cache, meta.slot_mapping)  # from here on the cache holds all keys
    floor_ms = 1e3 * _floor_s(case, ceilings)
    for provider, make in _providers(step, sweep=sweep):
        ms, error = timed(make)
        yield Row(shape, batch, provider, ms, floor_ms, error)


def timed(make: Make) -> tuple[float | None, str]:
    """Milliseconds, or None and what failed."""
    try:
        return _median_ms(_captured(make())), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _floor_s(case: Case, ceilings: Ceilings) -> float:
    width = case.head_dim + case.value_dim
    keys_seen = sum(new * (length - new) + new * (new + 1) // 2 for new, length in zip(case.query_lens, case.seq_lens, strict=True))
    num_bytes = 2 * width * (case.num_kv_heads * sum(case.seq_lens) + case.num_heads * case.num_tokens)
    return max(num_bytes / ceilings.bytes_per_s, 2 * case.num_heads * width * keys_seen / ceilings.flops_per_s)


def _providers(step: Step, *, sweep: bool) -> Iterator[tuple[str, Make]]:
    query, key, value, k_cache, v_cache, meta = step.arguments

    def ours() -> object:
        return triton_backend.paged_attention(query, k_cache, v_cache, meta, scale=step.options["scale"])

    yield "ours", lambda: ours
    yield "ours, cache write alone", lambda: partial(triton_backend.write_kv, key, value, k_cache, v_cache, meta.slot_mapping)
    if sweep:
        for tiles in swept_tiles(has_chunks=max(step.case.query_lens) > 1):
            name = " ".join(f"{part} {size}" for part, size in tiles.items()).replace("prefill_rows", "rows")
            yield name, partial(_tiled, ours, tiles)
    if importlib.util.find_spec("flashinfer") is not None:
        yield "flashinfer", partial(_flashinfer, step)
    if importlib.util.find_spec("flash_attn") is not None:
        yield "flash-attn", partial(_flash_attn, step)
    if len({*zip(step.case.query_lens, step.case.seq_lens, strict=True)}) == 1:
        yield "sdpa, gathered", partial(_sdpa, step)


def swept_tiles(*, has_chunks: bool) -> list[dict[str, int]]:
    """Tiles other than those of `choose_tiles`, as changes of `Tiles`; rows of chunks vary only if there are chunks."""
    sizes: dict[str, tuple[int, ...]] = {"keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}
    if has_chunks:
        sizes["prefill_rows"] = (32, 64, 128)
    return [dict(zip(sizes, chosen, strict=True)) for chosen in itertools.product(*sizes.values())]


def _tiled(run: Run, changes: dict[str, int]) -> Run:
    """The same with other tiles."""

    def tiled() -> object:
        with _other_tiles(changes):
            return run()

    return tiled


@contextmanager
def _other_tiles(changes: dict[str, int]) -> Iterator[None]:
    chosen = triton_backend.choose_tiles

    def other(*shape: Any) -> triton_backend.Tiles:
        tiles = replace(chosen(*shape), **changes)
        return replace(tiles, prefill_rows=max(tiles.prefill_rows, tiles.decode_rows))

    triton_backend.choose_tiles = other  # type: ignore[assignment]  # for this measurement
    triton_backend._shape_and_tiles.cache_clear()
    try:
        yield
    finally:
        triton_backend.choose_tiles = chosen
        triton_backend._shape_and_tiles.cache_clear()


def _flashinfer(step: Step) -> Run:
    """FlashInfer's kernel, planned beforehand."""
    backend = flashinfer_backend.FlashInferAttention(step.query.device)
    backend(*step.arguments, **step.options)
    (wrapper,) = backend._wrappers.values()
    return lambda: wrapper.run(step.query, (step.k_cache, step.v_cache))


def _flash_attn(step: Step) -> Run:
    """FlashAttention over its own cache: pages of 256, heads last."""
    from flash_attn import flash_attn_varlen_func

    case, page = step.case, 256
    counts = [ceil_div(length, page) for length in case.seq_lens]
    shape = (sum(counts), page, case.num_kv_heads)
    keys = torch.randn(*shape, case.head_dim, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(*shape, case.value_dim, device="cuda", dtype=torch.bfloat16)
    ids = iter(torch.randperm(sum(counts)).tolist())
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    table = table.cuda()
    key_starts = torch.nn.functional.pad(step.meta.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    options = {"softmax_scale": step.options["scale"], "causal": True, "block_table": table}
    longest = step.meta.max_query_len, step.meta.max_seq_len
    return lambda: flash_attn_varlen_func(step.query, keys, values, step.meta.query_start_loc, key_starts, *longest, **options)


def _sdpa(step: Step) -> Run:
    """torch's attention over dense keys of equal length; causal from the end."""
    from torch.nn.attention.bias import causal_lower_right

    case = step.case
    count, new, length = len(case.seq_lens), case.query_lens[0], case.seq_lens[0]
    query = step.query.view(count, new, case.num_heads, case.head_dim).transpose(1, 2)
    key = torch.randn(count, case.num_kv_heads, length, case.head_dim, device="cuda", dtype=torch.bfloat16)
    value = torch.randn(count, case.num_kv_heads, length, case.value_dim, device="cuda", dtype=torch.bfloat16)
    mask = None if new == 1 else causal_lower_right(new, length)
    group = case.num_heads // case.num_kv_heads
    if mask is not None:  # the kernels with a bias do not support groups
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(query, key, value, attn_mask=mask, scale=step.options["scale"], enable_gqa=mask is None)


def _captured(run: Run) -> Run:
    """The same work as the replay of a graph."""
    graph, _ = CudaGraphRecorder(torch.device("cuda", torch.cuda.current_device()))(lambda: (run(),))
    return graph.replay


def _median_ms(run: Run) -> float:
    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


if __name__ == "__main__":
    main()
