from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.paged_attention import Case, attention_by_definition, fresh, make_step, relative_error
from worker.engine.attention import torch_backend
from worker.engine.attention.torch_backend import attend, write_kv

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

MIXED = Case(query_lens=(1, 1, 1, 7, 40), seq_lens=(1, 17, 300, 7, 133))
CASES = {
    "decodes": Case(query_lens=(1,) * 9, seq_lens=(1, 2, 15, 16, 17, 31, 32, 33, 257), num_heads=9, num_kv_heads=3),
    "one whole prompt": Case(query_lens=(70,), seq_lens=(70,)),
    "chunk after a long context": Case(query_lens=(19,), seq_lens=(600,)),
    "chunks of one token after a chunk": Case(query_lens=(1, 20, 1), seq_lens=(33, 20, 8)),
    "mixed": MIXED,
    "one head each": replace(MIXED, num_heads=3, num_kv_heads=3),
    "many heads share one": replace(MIXED, num_heads=20, num_kv_heads=1),
    "blocks of 32": replace(MIXED, block_size=32),
    "blocks of 3": replace(MIXED, block_size=3),
    "narrower values": replace(MIXED, value_dim=24),
    "wider values": replace(MIXED, head_dim=24),
    "window": replace(MIXED, window=20),
    "window of one": replace(MIXED, window=1),
    "window of a block": replace(MIXED, window=16),
    "window longer than all": replace(MIXED, window=1000),
    "softcap": replace(MIXED, softcap=2.0),
    "sinks": replace(MIXED, sinks=True),
    "everything": replace(MIXED, window=33, softcap=5.0, sinks=True, value_dim=40, num_heads=6, num_kv_heads=3),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_what_the_definition_says_over_pages_of_nan(name: str, dtype: torch.dtype) -> None:
    step = make_step(CASES[name], dtype)
    out = attend(*step.arguments, **step.options)
    assert out.dtype == dtype
    assert relative_error(out, attention_by_definition(step)) < TOLERANCE[dtype]


def test_decodes_too_many_to_gather_at_once_are_gathered_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(CASES["decodes"])
    expected = attend(*fresh(step).arguments, **step.options)
    monkeypatch.setattr(torch_backend, "_GATHERED_ELEMENTS", 2 * 257 * 3 * 64)
    step.meta.scratch.clear()
    out = attend(*step.arguments, **step.options)
    assert len(step.meta.scratch["groups"]) == 5
    torch.testing.assert_close(out, expected)


def test_layers_of_one_step_may_have_different_windows() -> None:
    step = make_step(MIXED)
    other = replace(step, case=replace(MIXED, window=9), options={**step.options, "window": 9})
    for layer in (step, other, step):
        assert relative_error(attend(*layer.arguments, **layer.options), attention_by_definition(layer)) < 2e-6


def test_the_write_changes_the_slots_of_the_step_and_nothing_else() -> None:
    step = make_step(MIXED)
    before, meta = fresh(step), step.meta
    write_kv(step.key, step.value, step.k_cache, step.v_cache, meta)
    for cache, old, new in ((step.k_cache, before.k_cache, step.key), (step.v_cache, before.v_cache, step.value)):
        blocks, offsets = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
        old[blocks, :, offsets] = new
        assert torch.equal(cache.nan_to_num(9e9), old.nan_to_num(9e9))


def test_a_negative_slot_is_not_written() -> None:
    step = make_step(CASES["decodes"])
    before = fresh(step)
    step.meta.slot_mapping.fill_(-1)
    write_kv(step.key, step.value, step.k_cache, step.v_cache, step.meta)
    assert torch.equal(step.k_cache.nan_to_num(9e9), before.k_cache.nan_to_num(9e9))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_sequence_of_nan_leaves_its_neighbours_alone(sinks: bool) -> None:
    step = make_step(replace(MIXED, sinks=sinks))
    expected = attend(*fresh(step).arguments, **step.options)
    step.query[2] = step.key[2] = step.value[2] = torch.nan
    out = attend(*step.arguments, **step.options)
    assert out[2].isnan().all()
    others = torch.arange(out.shape[0]) != 2
    assert torch.equal(out[others], expected[others])


def test_heads_may_be_slices_of_a_merged_projection() -> None:
    step = make_step(MIXED)
    expected = attend(*fresh(step).arguments, **step.options)
    heads = [step.query, step.key, step.value]
    query, key, value = torch.cat(heads, 1).split([tensor.shape[1] for tensor in heads], 1)
    assert torch.equal(attend(*replace(step, query=query, key=key, value=value).arguments, **step.options), expected)
