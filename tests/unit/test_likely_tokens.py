"""Likely tokens: the kernel against torch, with every instruction set."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.sampling import SamplingParams
from tests.instruction_sets import INSTRUCTION_SETS, kernels_for
from worker.engine.likely_tokens import MASS_BITS, LikelyTokens, SampledRows, find_natively, find_with_torch


def rows_of(logits: torch.Tensor, temperature: float = 1.0) -> SampledRows:
    count = logits.shape[0]
    return SampledRows(logits, logits.amax(-1), torch.full((count,), temperature), [SamplingParams()] * count)


def random_rows(rows: int, vocab: int, temperature: float, seed: int = 0) -> SampledRows:
    return rows_of(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4, temperature)


def assert_same(found: LikelyTokens, expected: LikelyTokens) -> None:
    for name in ("row", "token", "logit", "count"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("mass", "tail"):
        weights = [getattr(likely, name).double() / 2**MASS_BITS for likely in (found, expected)]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("vocab", [1, 7, 16, 1000, 2049])
def test_the_kernel_finds_what_torch_finds(instruction_set: str, vocab: int) -> None:
    lib = kernels_for(instruction_set)
    for temperature in (0.01, 0.7, 1.0, 5.0):
        rows = random_rows(5, vocab, temperature)
        for nats in (0.0, 3.0, 10.0, 1e9, math.inf):
            floor = rows.top - nats * temperature
            assert_same(find_natively(lib, rows, floor), find_with_torch(rows, floor))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_impossible_tokens_weigh_nothing(instruction_set: str) -> None:
    logits = torch.full((2, 70), -math.inf)
    logits[0, 69] = -3.0
    logits[1, :] = 0.0
    likely = find_natively(kernels_for(instruction_set), rows_of(logits), torch.tensor([-13.0, 1.0]))
    assert (likely.row.tolist(), likely.token.tolist()) == ([0], [69])
    assert likely.count.tolist() == [1, 0]
    assert likely.tail[0] == 0
    assert likely.tail[1] / 2**MASS_BITS == pytest.approx(70, rel=1e-6)
    assert likely.total_mass()[0] / 2**MASS_BITS == pytest.approx(1, rel=1e-6)


def test_a_row_is_the_same_alone() -> None:
    rows = random_rows(9, 3001, 1.3)
    floor = rows.top - 10.0
    together = find_natively(kernels_for("native"), rows, floor)
    for row in range(9):
        alone = find_natively(kernels_for("native"), rows.select([row]), floor[row : row + 1])
        assert torch.equal(alone.token, together.token[together.row == row])
        assert alone.tail.item() == together.tail[row].item()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_likely_tokens_are_selected_and_raised_row_by_row(logits: list[list[int]], data: st.DataObject) -> None:
    """As lists of lists do it."""
    width = max(map(len, logits))
    table = torch.tensor([[*map(float, row), *[-math.inf] * (width - len(row))] for row in logits])
    floor = [float(data.draw(st.integers(0, max(row)))) for row in logits]
    likely = find_with_torch(rows_of(table), torch.tensor(floor))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(logits) - 1), min_size=1)))
    kept = [[value for value in logits[row] if value >= floor[row]] for row in chosen]
    selected = likely.select(chosen)
    assert [selected.logit[selected.row == row].tolist() for row in range(len(chosen))] == kept
    higher = [floor[row] + 1 for row in chosen]
    raised = selected.at_least(torch.tensor(higher))
    assert raised.count.tolist() == [sum(value >= least for value in row) for row, least in zip(kept, higher, strict=True)]
    assert torch.equal(raised.tail, selected.tail)
