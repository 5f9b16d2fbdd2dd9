"""Triton's attention kernels against the definition, run by Triton's interpreter: see test_attention_triton.py.

Float32 throughout: the interpreter's bfloat16 products are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.paged_attention import CASES, Case, attention_by_definition, fresh, make_step, relative_error
from tests.tiny_models import tiny_model
from worker.engine.attention import triton_backend
from worker.engine.attention.triton_backend import attend, choose_tiles, decode_split_count, prefill_split_count, write_kv
from worker.engine.attention.triton_kernels import reduce_splits_kernel
from worker.engine.config import EngineConfig
from worker.engine.kernels import KernelChoice
from worker.engine.model_loader import prepare_model
from worker.engine.model_runner import ModelRunner


@pytest.mark.parametrize("name", CASES)
def test_attention_is_what_the_definition_says(name: str) -> None:
    step = make_step(CASES[name])
    out = attend(*step.arguments, **step.options)
    assert relative_error(out, attention_by_definition(step)) < 2e-6


@pytest.mark.parametrize("seed", range(4))
def test_a_random_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    num_decodes, num_chunks = numbers(2, 1, 4)
    query_lens = [1] * num_decodes + numbers(num_chunks, 2, 40)
    seq_lens = [new + before for new, before in zip(query_lens, numbers(len(query_lens), 0, 400), strict=True)]
    step = make_step(
        Case(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), num_heads=3, num_kv_heads=1, head_dim=32, value_dim=32, seed=seed)
    )
    assert relative_error(attend(*step.arguments, **step.options), attention_by_definition(step)) < 2e-6


def test_the_write_changes_the_slots_of_the_step_and_nothing_else() -> None:
    step = make_step(CASES["mixed"])
    before, meta = fresh(step), step.meta
    write_kv(step.key, step.value, step.k_cache, step.v_cache, meta.slot_mapping)
    for cache, old, new in ((step.k_cache, before.k_cache, step.key), (step.v_cache, before.v_cache, step.value)):
        blocks, offsets = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
        assert torch.equal(cache[blocks, :, offsets], new)
        old[blocks, :, offsets] = new
        assert torch.equal(cache.nan_to_num(9e9), old.nan_to_num(9e9))


def test_a_negative_slot_is_not_written() -> None:
    step = make_step(CASES["decodes"])
    before = fresh(step)
    write_kv(step.key, step.value, step.k_cache, step.v_cache, torch.full_like(step.meta.slot_mapping, -1))
    assert torch.equal(step.k_cache.nan_to_num(9e9), before.k_cache.nan_to_num(9e9))
    assert torch.equal(step.v_cache.nan_to_num(9e9), before.v_cache.nan_to_num(9e9))


def test_a_padded_row_without_keys_gives_zeros() -> None:
    step = make_step(CASES["decodes"])
    step.meta.seq_lens[1] = 0
    out = attend(*step.arguments, **step.options)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert not out.isnan().any()


def test_heads_may_be_slices_of_merged_projections() -> None:
    step = make_step(CASES["mixed"])
    expected = attend(*fresh(step).arguments, **step.options)
    heads = [step.query, step.key, step.value]
    merged = torch.cat(heads, 1)
    query, key, value = merged.split([tensor.shape[1] for tensor in heads], 1)
    assert not query.is_contiguous()
    sliced = replace(step, query=query, key=key, value=value)
    assert torch.equal(attend(*sliced.arguments, **step.options), expected)


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum of the broken row
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    step = make_step(CASES["mixed"])
    clean = attend(*fresh(step).arguments, **step.options)
    step.query[1] = torch.nan
    step.key[1] = torch.nan
    out = attend(*step.arguments, **step.options)
    assert out[1].isnan().all()
    others = [row for row in range(len(out)) if row != 1]
    assert torch.equal(out[others], clean[others])


def test_the_grid_of_decodes_does_not_depend_on_the_lengths() -> None:
    """A captured launch is replayed for other lengths: here, the same launch with lengths changed only on the device."""
    long = make_step(Case(query_lens=(1, 1), seq_lens=(900, 1200)))
    short = make_step(Case(query_lens=(1, 1), seq_lens=(20, 400)))
    captured = replace(short, meta=replace(short.meta, max_seq_len=long.meta.max_seq_len))  # what a capture assumes
    out = attend(*captured.arguments, **short.options)
    assert relative_error(out, attention_by_definition(short)) < 2e-6


def test_a_decode_is_split_alike_in_a_batch_padded_to_a_power_of_two() -> None:
    for batch_size in (3, 5, 9, 100):
        padded = 1 << (batch_size - 1).bit_length()
        assert decode_split_count(batch_size, 8, 100_000, 132) == decode_split_count(padded, 8, 100_000, 132)


def test_split_counts_are_bounded_by_the_keys_and_the_device() -> None:
    assert decode_split_count(4, 8, 200, 132) == 1
    assert decode_split_count(1, 1, 1_000_000, 132) == 64
    assert decode_split_count(256, 8, 1_000_000, 132) == 8
    assert prefill_split_count(0, 8, 100_000, 132) == 1
    assert prefill_split_count(4, 8, 100_000, 132) == 8
    assert prefill_split_count(400, 8, 100_000, 132) == 1


@pytest.mark.parametrize("shared_kb", [61, 96])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [12, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_tiles_fit_the_shared_memory_of_the_card(group: int, head_dim: int, itemsize: int, shared_kb: int) -> None:
    if (head_dim, itemsize, shared_kb) == (512, 4, 61):
        pytest.skip("the least tiles take more, and the reference serves")
    tiles = choose_tiles(group, head_dim, head_dim, itemsize, shared_kb * 1024)
    width = max(16, 1 << (head_dim - 1).bit_length())
    assert (2 * tiles.stages * tiles.keys + tiles.prefill_rows) * width * itemsize <= (shared_kb + 3) * 1024
    assert min(tiles.decode_rows, tiles.prefill_rows) >= max(16, group)


class Reductions:
    """`reduce_splits_kernel`, watched."""

    def __init__(self) -> None:
        self.of_prefill: set[bool] = set()

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.of_prefill.add(options["HAS_PREFILL"])
            reduce_splits_kernel[grid](*arguments, **options)

        return launch


def test_splits_of_both_kinds_are_launched_and_compared_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card compiles each the first time it is launched, which must not be while it serves."""
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: attend)
    monkeypatch.setattr("worker.engine.model_runner.SPLIT_TOKENS", 300)  # the interpreter takes its time
    monkeypatch.setattr(KernelChoice, "_fuse", lambda *_: None)
    reductions = Reductions()
    monkeypatch.setattr(triton_backend, "reduce_splits_kernel", reductions)
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    loaded = prepare_model(tiny_model("llama", **small), None, "tiny")
    ModelRunner(loaded, EngineConfig(num_blocks=64, max_batch_size=4, max_batch_tokens=512))
    assert reductions.of_prefill == {True, False}


def test_the_interpreter_runs_these_tests() -> None:
    assert type(triton_backend.write_kv_kernel).__name__ == "InterpretedFunction"
