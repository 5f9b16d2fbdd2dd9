"""Keys and values in int8: the native kernels against the definition on the rounded rows, and engines that move blocks about."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from producer.errors import ModelUnavailable
from tests.instruction_sets import INSTRUCTION_SETS, kernels_for
from tests.paged_attention import Case, Step, attention_by_definition, make_step, relative_error
from tests.tiny_engine import EOS, loaded_model, request, run, tiny_engine, tiny_runner
from worker.engine.attention import torch_backend
from worker.engine.attention.cpu_backend import CpuAttention
from worker.engine.config import SCALE_BYTES, EngineConfig
from worker.engine.kernels import choose_backend
from worker.engine.kv_cache import KVCache, block_bytes
from worker.engine.native.library import GROUP, kernels
from worker.engine.quantization import with_scale, without_scale

native = pytest.mark.skipif(kernels() is None, reason="no C compiler")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
MIXED = Case(query_lens=(1, 1, 1, 7, 40), seq_lens=(1, 17, 300, 7, 133))
CASES = {
    "mixed": MIXED,
    "decodes": Case(query_lens=(1,) * 9, seq_lens=(1, 2, 15, 16, 17, 31, 32, 33, 257), num_heads=9, num_kv_heads=3),
    "long sequences, split": Case(query_lens=(1, 1, 5), seq_lens=(5000, 33, 3001), num_heads=4, num_kv_heads=1, sinks=True),
    "blocks of 32": replace(MIXED, block_size=32),
    "blocks of 48": replace(MIXED, block_size=48),
    "window, softcap and sinks": replace(MIXED, window=33, softcap=5.0, sinks=True),
    "window over a long context": Case(query_lens=(1, 3, 50), seq_lens=(900, 700, 2000), window=513),
    "narrow": replace(MIXED, head_dim=8, value_dim=12),
    "wider values": replace(MIXED, head_dim=72, value_dim=80),
    "wide": replace(MIXED, head_dim=256, value_dim=256),
}


def packed(rows: Tensor, *, keys: bool) -> Tensor:
    """Rows of codes and scale, ``[blocks, heads, tokens, dims + 4]``, in the order of ``native/int8_cache.h``, same shape."""
    codes, scales = (part.unflatten(2, (-1, GROUP)) for part in (rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]))
    ordered = codes.transpose(3, 4) if keys else codes
    return torch.cat([ordered.flatten(3), scales.flatten(3)], -1).view(rows.shape)


def write_plainly(step: Step) -> None:
    slots = step.meta.slot_mapping
    blocks, offsets = slots // step.case.block_size, slots % step.case.block_size
    step.k_cache[blocks, :, offsets] = step.key
    step.v_cache[blocks, :, offsets] = step.value


def expected(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """The caches' rows after the step, and attention by the definition on what they stand for."""
    write_plainly(step)
    k_rows, v_rows = with_scale(step.k_cache), with_scale(step.v_cache)
    read = replace(step, k_cache=without_scale(k_rows, torch.float32), v_cache=without_scale(v_rows, torch.float32))
    return k_rows, v_rows, attention_by_definition(read)


def check(case: Case, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    step = make_step(case, dtype)
    k_packed, v_packed = packed(with_scale(step.k_cache), keys=True), packed(with_scale(step.v_cache), keys=False)
    out = CpuAttention(lib)(step.query, step.key, step.value, k_packed, v_packed, step.meta, **step.options)
    k_rows, v_rows, exact = expected(step)
    assert torch.equal(k_packed, packed(k_rows, keys=True))
    assert torch.equal(v_packed, packed(v_rows, keys=False))
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return kernels_for(request.param)


@native
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_write_and_read_what_the_rounded_rows_say(name: str, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    check(CASES[name], dtype, lib)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["mixed", "decodes", "window, softcap and sinks", "wider values"])
def test_so_does_the_reference(name: str, dtype: torch.dtype) -> None:
    step = make_step(CASES[name], dtype)
    caches = with_scale(step.k_cache), with_scale(step.v_cache)
    out = torch_backend.attend(step.query, step.key, step.value, *caches, step.meta, **step.options)
    k_rows, v_rows, exact = expected(step)
    assert torch.equal(caches[0], k_rows)
    assert torch.equal(caches[1], v_rows)
    assert relative_error(out, exact) < max(2e-6, TOLERANCE[dtype] * 3)


@native
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden_and_stays_in_its_sequence(value: float, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
    step = make_step(MIXED, dtype)
    step.key[1, 0, 3] = step.value[2, 1, 5] = value
    caches = packed(with_scale(step.k_cache), keys=True), packed(with_scale(step.v_cache), keys=False)
    out = CpuAttention(lib)(step.query, step.key, step.value, *caches, step.meta, **step.options)
    assert out[1, :2].isnan().all()
    assert out[2, 2:].isnan().all()
    assert not out[[0, *range(3, step.case.num_tokens)]].isnan().any()


@native
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e30])
def test_rows_of_any_magnitude_are_written_as_the_reference_writes_them(size: float, lib: ctypes.CDLL) -> None:
    step = make_step(MIXED)
    step.key.mul_(size)
    step.value.mul_(size)
    caches = packed(with_scale(step.k_cache), keys=True), packed(with_scale(step.v_cache), keys=False)
    CpuAttention(lib)(step.query, step.key, step.value, *caches, step.meta, **step.options)
    k_rows, v_rows, _ = expected(step)
    assert torch.equal(caches[0], packed(k_rows, keys=True))
    assert torch.equal(caches[1], packed(v_rows, keys=False))


def test_a_block_holds_its_scales_and_its_bytes_are_counted() -> None:
    runner = tiny_runner(loaded_model(), num_blocks=6, kv_dtype="int8", cpu_swap_blocks=2)
    assert all(tensor.shape == (6, 2, 16, 16 + SCALE_BYTES) for pair in runner.cache.layers for tensor in pair)
    cache = KVCache(runner.layers, 6, 16, torch.int8, torch.device("cpu"))
    assert block_bytes(runner.layers, 16, torch.int8) * 6 == sum(tensor.nbytes for pair in cache.layers for tensor in pair)


def test_a_budget_of_memory_holds_more_blocks() -> None:
    budget = {"num_blocks": None, "kv_memory_bytes": 1 << 20}
    wide, narrow = (tiny_runner(loaded_model(), **budget, kv_dtype=kv).num_blocks for kv in ("auto", "int8"))
    assert narrow == (1 << 20) // (4 * 2 * 2 * 16 * (16 + SCALE_BYTES))
    assert narrow > 3 * wide  # of float32


def tokens(engine: Any, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    requests = [request(f"r{i}", prompt, 24, arrival=i, **fields) for i, prompt in enumerate(prompts)]
    run(engine, requests)
    return [item.output_token_ids for item in requests]


PREFIX = [*range(40, 90)]
PROMPTS = [[*PREFIX, i] for i in range(6)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt by itself, with nothing shared, preempted or swapped."""
    engine = tiny_engine(kv_dtype="int8", enable_prefix_caching=False)
    return [tokens(engine, [prompt])[0] for prompt in PROMPTS]


def test_shared_prefixes_change_nothing(alone: list[list[int]]) -> None:
    engine = tiny_engine(kv_dtype="int8")
    assert tokens(engine, PROMPTS[:1]) == alone[:1]
    assert tokens(engine, PROMPTS) == alone


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_preempted_requests_go_on_as_if_nothing_had_been(swap_blocks: int, alone: list[list[int]]) -> None:
    settings = {"num_blocks": 14, "batch_overcommit": 4.0, "cpu_swap_blocks": swap_blocks, "enable_prefix_caching": False}
    engine = tiny_engine(kv_dtype="int8", **settings)
    assert tokens(engine, PROMPTS, tier="batch") == alone
    stats = engine.stats()
    assert (stats.swap_preemptions if swap_blocks else stats.recompute_preemptions) > 0


def test_several_outputs_of_a_prompt_part_ways_over_blocks_of_their_own(alone: list[list[int]]) -> None:
    engine = tiny_engine(kv_dtype="int8")
    outputs = engine.generate("the same prompt", n=3, temperature=0.0, max_tokens=16, ignore_eos=True)[0].choices
    assert outputs is not None
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert EOS not in outputs[0].token_ids


@native
def test_the_kernels_generate_what_the_reference_does(alone: list[list[int]]) -> None:
    assert tokens(tiny_engine(kv_dtype="int8", attention="torch"), PROMPTS) == alone


def test_attention_that_cannot_read_it_is_refused() -> None:
    runner = tiny_runner(loaded_model(), num_blocks=4)
    on_gpu = replace(loaded_model(), device=torch.device("cuda"))
    for loaded, attention in ((on_gpu, "auto"), (on_gpu, "flashinfer"), (loaded_model(), "flashinfer")):
        with pytest.raises(ModelUnavailable, match=r"kv_dtype int8: .* only attention torch"):
            choose_backend(loaded, runner.layers, EngineConfig(kv_dtype="int8", attention=attention))
    assert choose_backend(on_gpu, runner.layers, EngineConfig(kv_dtype="int8", attention="torch")) is torch_backend.attend
