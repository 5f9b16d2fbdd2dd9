"""The Triton kernels against the definition, in float64, and against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.paged_attention import CASES, Case, Step, attention_by_definition, fresh, make_step, relative_error
from worker.engine.arithmetic import ceil_div
from worker.engine.attention import torch_backend

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LONG = 100_000
IN_OTHER_DTYPES = (  # one compilation each: the interpreter runs all cases in float32, and a dtype changes only tiles and instructions
    "mixed",  # decodes and chunks, groups of two heads
    "split chunks",  # both splits and their reduction, products over groups in one tile
    "head size 256",  # the widest tiles: fewest keys, most warps
    "narrower values",  # masked columns of keys and of values, not the same ones
    "everything",  # window, soft cap and sinks over splits
)
DTYPED_CASES = [*product(CASES, [torch.bfloat16]), *product(IN_OTHER_DTYPES, [torch.float32, torch.float16])]


def attend(step: Step) -> torch.Tensor:
    from worker.engine.attention import triton_backend  # triton is there where CUDA is

    return triton_backend.attend(*step.arguments, **step.options)


def check(step: Step) -> None:
    out = attend(step)
    assert out.dtype == step.query.dtype
    assert relative_error(out, attention_by_definition(step)) < TOLERANCE[out.dtype]


@pytest.mark.parametrize(("name", "dtype"), DTYPED_CASES)
def test_attention_is_what_the_definition_says(name: str, dtype: torch.dtype) -> None:
    check(make_step(CASES[name], dtype, "cuda"))


@pytest.mark.parametrize("name", IN_OTHER_DTYPES)
def test_the_reference_backend_agrees(name: str) -> None:
    step = make_step(CASES[name], torch.float32, "cuda")
    other = fresh(step)
    assert relative_error(attend(step), torch_backend.attend(*other.arguments, **other.options)) < 4e-6
    for ours, theirs in ((step.k_cache, other.k_cache), (step.v_cache, other.v_cache)):
        assert torch.equal(ours.nan_to_num(9e9), theirs.nan_to_num(9e9))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (8, 1, 256)])
def test_random_batches(num_heads: int, num_kv_heads: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    num_decodes, num_chunks = numbers(2, 0, 40)
    query_lens = [1] * (num_decodes + 1) + numbers(num_chunks // 10, 2, 300)
    seq_lens = [new + before for new, before in zip(query_lens, numbers(len(query_lens), 0, 5000), strict=True)]
    shape: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": dim, "value_dim": dim}
    check(make_step(Case(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), seed=seed, **shape), torch.bfloat16, "cuda"))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((1,), (LONG,)), ((1, 1, 1), (LONG, 50, 40_000)), ((1, 64), (20, LONG)), ((1, 3, 7), (LONG, LONG, 9))],
    ids=["a decode", "decodes", "a chunk", "short chunks"],
)
@pytest.mark.parametrize("options", [{}, {"window": 4096}, {"sinks": True}], ids=["full", "window", "sinks"])
def test_long_contexts(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], options: dict[str, Any]) -> None:
    check(make_step(Case(query_lens=query_lens, seq_lens=seq_lens, num_heads=8, **options), torch.bfloat16, "cuda"))


def test_a_cache_of_more_elements_than_an_int32_counts(free_bytes: int) -> None:
    if free_bytes < 26 << 30:
        pytest.skip("needs 26 GB of device memory")
    case = Case(query_lens=(1, 1, 30), seq_lens=(3000, 700, 1500), num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128)
    step = make_step(case, torch.bfloat16, "cuda", spare_blocks=300_000)
    assert step.k_cache.numel() > 2 * 2**31
    used = torch.cat([step.meta.block_tables[row, : ceil_div(length, 16)] for row, length in enumerate(case.seq_lens)])
    assert int(used.max()) * step.k_cache.stride(0) > 2**31
    check(step)


def test_a_captured_launch_serves_other_lengths() -> None:
    """As a decode graph does: the same launches, with lengths, tables and slots changed in place."""
    steps = [
        make_step(Case(query_lens=(1,) * 4, seq_lens=lengths, num_heads=8, seed=seed), torch.bfloat16, "cuda")
        for seed, lengths in enumerate([(5000, 4000, 20, 9), (7, 300, 5100, 1)])
    ]
    tables = torch.zeros(4, 400, dtype=torch.int32, device="cuda")
    captured = replace(steps[0], meta=replace(steps[0].meta, block_tables=tables, max_seq_len=400 * 16))

    def fill(step: Step) -> None:
        tables.zero_()
        tables[:, : step.meta.block_tables.shape[1]] = step.meta.block_tables.clamp(max=0x7FFF)
        for name in ("seq_lens", "slot_mapping"):
            getattr(captured.meta, name).copy_(getattr(step.meta, name))
        for name in ("query", "key", "value"):
            getattr(captured, name).copy_(getattr(step, name))
        for name in ("k_cache", "v_cache"):
            source, target = getattr(step, name), getattr(captured, name)
            target[: len(source)].copy_(source[: len(target)])

    num_blocks = max(len(step.k_cache) for step in steps)
    captured = replace(
        captured,
        k_cache=steps[0].k_cache.new_zeros(num_blocks, *steps[0].k_cache.shape[1:]),
        v_cache=steps[0].v_cache.new_zeros(num_blocks, *steps[0].v_cache.shape[1:]),
        query=steps[0].query.clone(),
        key=steps[0].key.clone(),
        value=steps[0].value.clone(),
        meta=replace(captured.meta, seq_lens=steps[0].meta.seq_lens.clone(), slot_mapping=steps[0].meta.slot_mapping.clone()),
    )
    fill(steps[0])
    attend(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(captured)
    for step in (steps[1], steps[0], steps[1]):
        fill(step)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = attend(fresh(step))
        assert torch.equal(out, expected)


def test_batch_sizes_and_lengths_share_compiled_kernels() -> None:
    from worker.engine.attention.triton_kernels import paged_attention_kernel

    def num_compiled() -> int:
        (cache, *_) = paged_attention_kernel.device_caches[torch.cuda.current_device()]
        return len(cache)

    def run(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        attend(make_step(Case(query_lens=query_lens, seq_lens=seq_lens, num_heads=6), torch.bfloat16, "cuda"))

    run((1,) * 3, (40, 16, 600))
    run((1, 9), (40, 16))
    before = num_compiled()
    for count in (1, 2, 16, 17, 64, 100):
        run((1,) * count, tuple(range(16, 16 + 16 * count, 16)))
        run((*((1,) * count), 16, 33), (*((1000,) * count), 16, 4000))
    assert num_compiled() == before
