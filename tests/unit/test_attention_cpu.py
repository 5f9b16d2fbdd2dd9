from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.instruction_sets import INSTRUCTION_SETS, kernels_for
from tests.paged_attention import Case, Step, attention_by_definition, make_step, relative_error
from worker.engine.attention.cpu_backend import CpuAttention, supports
from worker.engine.native.library import GROUP, kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")

# Rounding of one bfloat16 operation is 2**-9; weights and outputs are rounded once each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}

MIXED = Case(query_lens=(1, 1, 1, 7, 40), seq_lens=(1, 17, 300, 7, 133))
CASES = {
    "decodes": Case(query_lens=(1,) * 9, seq_lens=(1, 2, 15, 16, 17, 31, 32, 33, 257), num_heads=9, num_kv_heads=3),
    "one whole prompt": Case(query_lens=(200,), seq_lens=(200,), num_heads=9, num_kv_heads=3),
    "chunk after a long context": Case(query_lens=(19,), seq_lens=(1500,), num_heads=6, num_kv_heads=2),
    "mixed": MIXED,
    "one head each": replace(MIXED, num_heads=3, num_kv_heads=3),
    "many heads share one": replace(MIXED, num_heads=40, num_kv_heads=1),
    "blocks of 32": replace(MIXED, block_size=32),
    "blocks of 48": replace(MIXED, block_size=48),
    "window": replace(MIXED, window=20),
    "window of one": replace(MIXED, window=1),
    "window over a long context": Case(query_lens=(1, 3, 50), seq_lens=(900, 700, 2000), window=513),
    "softcap": replace(MIXED, softcap=2.0),
    "sinks": replace(MIXED, sinks=True),
    "window, softcap and sinks": replace(MIXED, window=33, softcap=5.0, sinks=True),
    "long sequences, split": Case(query_lens=(1, 1, 5), seq_lens=(5000, 33, 3001), num_heads=4, num_kv_heads=1, sinks=True),
    "long sequence with a window, split": Case(query_lens=(1,), seq_lens=(6000,), window=4000, num_heads=2, num_kv_heads=1),
}
DIMS = [(2, 2), (8, 8), (24, 24), (40, 40), (64, 32), (72, 80), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


def pack_keys(cache: Tensor) -> Tensor:
    """Plain ``[blocks, heads, tokens, dims]`` into the order of ``native/attention.h``, same shape."""
    pair = 2 if cache.dtype == torch.bfloat16 else 1
    blocks, heads, tokens, dims = cache.shape
    grouped = cache.view(blocks, heads, tokens // GROUP, GROUP, dims // pair, pair)
    return grouped.transpose(3, 4).reshape(cache.shape).contiguous()


def pack_values(cache: Tensor) -> Tensor:
    if cache.dtype == torch.float32:
        return cache.clone()
    blocks, heads, tokens, dims = cache.shape
    return cache.view(blocks, heads, tokens // 2, 2, dims).transpose(3, 4).reshape(cache.shape).contiguous()


def write_plainly(step: Step) -> None:
    slots = step.meta.slot_mapping
    blocks, offsets = slots // step.case.block_size, slots % step.case.block_size
    step.k_cache[blocks, :, offsets] = step.key
    step.v_cache[blocks, :, offsets] = step.value


def check(case: Case, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    step = make_step(case, dtype)
    k_packed, v_packed = pack_keys(step.k_cache), pack_values(step.v_cache)
    out = CpuAttention(lib)(step.query, step.key, step.value, k_packed, v_packed, step.meta, **step.options)
    write_plainly(step)
    assert torch.equal(k_packed.nan_to_num(7.0), pack_keys(step.k_cache).nan_to_num(7.0))
    assert torch.equal(v_packed.nan_to_num(7.0), pack_values(step.v_cache).nan_to_num(7.0))
    assert relative_error(out, attention_by_definition(step)) < TOLERANCE[dtype]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return kernels_for(request.param)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_equals_attention_by_definition(name: str, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    check(CASES[name], dtype, lib)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_any_head_size(head_dim: int, value_dim: int, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    check(replace(MIXED, head_dim=head_dim, value_dim=value_dim), dtype, lib)


@pytest.mark.parametrize("length", [*range(1, 36), 255, 256, 257, 271, 272, 273, 511, 512, 513])
def test_lengths_around_the_borders_of_groups_and_spans(length: int, lib: ctypes.CDLL) -> None:
    check(Case(query_lens=(1, min(length, 21)), seq_lens=(length, length), seed=length), torch.bfloat16, lib)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, lib: ctypes.CDLL) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(CASES["long sequences, split"], torch.bfloat16, lib)
    finally:
        torch.set_num_threads(before)


def test_rows_of_a_merged_projection_need_no_copy() -> None:
    step = make_step(MIXED, torch.bfloat16)
    merged = torch.cat([x.flatten(1) for x in (step.query, step.key, step.value)], 1)
    q, k, v = merged.split([x[0].numel() for x in (step.query, step.key, step.value)], 1)
    caches = pack_keys(step.k_cache), pack_values(step.v_cache)
    views = q.view(step.query.shape), k.view(step.key.shape), v.view(step.value.shape)
    out = CpuAttention()(*views, *caches, step.meta, **step.options)
    write_plainly(step)
    assert relative_error(out, attention_by_definition(step)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_of_the_model_is_not_hidden_and_stays_in_its_sequence(dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    step = make_step(MIXED, dtype)
    step.query[1] = torch.nan
    out = CpuAttention(lib)(step.query, step.key, step.value, pack_keys(step.k_cache), pack_values(step.v_cache), step.meta, **step.options)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()
    assert not out[2:].isnan().any()


def test_refuses_shapes_it_would_get_wrong() -> None:
    assert not supports(torch.float16, 4, 2, 64, 16)
    assert not supports(torch.bfloat16, 4, 2, 63, 16)
    assert not supports(torch.bfloat16, 4, 2, 64, 8)
    assert supports(torch.float32, 4, 2, 63, 16)
