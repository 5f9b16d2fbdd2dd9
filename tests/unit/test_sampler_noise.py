"""The noise: independent of its place in a tensor, and distributed as it should be."""

import math

import pytest
import torch

from worker.engine.noise import gumbel, row_key


@pytest.mark.parametrize("threads", [1, 2])
def test_noise_is_the_same_at_every_place_of_every_tensor(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        keys = torch.tensor([row_key(seed, 5) for seed in range(50)]).repeat_interleave(2000)
        tokens = torch.arange(2000).repeat(50)
        whole = gumbel(keys, tokens)
        for start, stop in ((0, 1), (1, 2), (3, 20), (17, 33), (99_999, 100_000), (1, 100_000), (40_007, 77_771)):
            assert torch.equal(gumbel(keys[start:stop], tokens[start:stop]), whole[start:stop])
    finally:
        torch.set_num_threads(before)


def test_noise_is_finite_within_its_bounds_and_has_gumbels_moments() -> None:
    noise = torch.cat([gumbel(torch.full((50_000,), row_key(seed, 0)), torch.arange(50_000)) for seed in range(20)]).double()
    assert -2.9 < noise.min() < -2.0
    assert 12.0 < noise.max() < 22.9
    assert abs(noise.mean() - 0.5772) < 0.005
    assert abs(noise.var() - math.pi**2 / 6) < 0.02


def test_one_bit_of_seed_position_or_token_changes_everything() -> None:
    base = gumbel(torch.full((64,), row_key(1, 1)), torch.arange(64))
    for other in (row_key(0, 1), row_key(1, 0), row_key(1, 2), row_key(1 + 2**40, 1), row_key(-1, 1)):
        assert (gumbel(torch.full((64,), other), torch.arange(64)) != base).all()
    keys = torch.tensor([row_key(seed, position) for seed in range(300) for position in range(300)])
    assert len(keys.unique()) == len(keys)


def test_draws_of_neighbouring_tokens_and_positions_are_uncorrelated() -> None:
    grid = torch.stack([gumbel(torch.full((512,), row_key(9, position)), torch.arange(512)) for position in range(512)]).double()
    grid -= grid.mean()
    for shifted in (grid.roll(1, 0), grid.roll(1, 1), grid.roll((1, 1), (0, 1))):
        assert abs((grid * shifted).mean() / grid.var()) < 0.01
