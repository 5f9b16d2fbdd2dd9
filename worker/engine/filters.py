"""Which tokens may be drawn. Every filter becomes a floor: the least logit that a token of the row may have.

Tokens of equal logits are treated alike, so a floor does not depend on how a sort orders them. Masses are summed as
integers, which is exact, so it does not depend on the order or the shape of the sum either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.likely_tokens import LIKELY_NATS, LikelyTokens, SampledRows, find_likely_tokens


def is_unfiltered(params: SamplingParams) -> bool:
    """Whether every token may be drawn."""
    return params.top_p == 1.0 and params.top_k <= 0 and params.min_p == 0.0


def floors(rows: SampledRows, likely: LikelyTokens) -> Tensor:
    """[rows] float32: the least logit allowed by min-p, top-k and top-p, each applied to what the previous one left.

    Min-p (Nguyen et al. 2024) keeps tokens with at least that share of the likeliest's probability. Top-k keeps the k likeliest and
    their ties. Top-p (nucleus, Holtzman et al. 2020) keeps the smallest set of the likeliest whose renormalised mass reaches p.

    Args:
        likely: of the same rows, the tokens within `LIKELY_NATS` of the likeliest.
    """
    floor = _min_p_floors(rows)
    pending = [row for row, params in enumerate(rows.params) if params.top_k > 0 or params.top_p < 1.0]
    if not pending:
        return floor
    total = likely.total_mass()

    def settle(part: LikelyTokens, least: Tensor) -> list[int]:
        """Set the floors of the pending rows for which the tokens down to ``least`` suffice; returns the other rows."""
        index = torch.tensor(pending, device=floor.device)
        params = [rows.params[row] for row in pending]
        found, known = _floors_among(part, least, params, rows.logits.shape[1], floor[index], total[index])
        floor[index] = torch.where(known, found, floor[index])
        return [row for row, done in zip(pending, known.tolist(), strict=True) if not done]

    pending = settle(likely.select(pending), (rows.top - LIKELY_NATS * rows.temperature)[pending])
    if pending:
        selected = rows.select(pending)
        least = _top_k_floors(selected)
        settle(find_likely_tokens(selected, least), least)
    return floor


def _min_p_floors(rows: SampledRows) -> Tensor:
    logs = [math.log(params.min_p) if params.min_p > 0.0 else -math.inf for params in rows.params]
    return rows.top + rows.temperature * torch.tensor(logs, dtype=torch.float32, device=rows.top.device)


def _top_k_floors(rows: SampledRows) -> Tensor:
    """By top-k alone; -inf for rows without it."""
    vocab = rows.logits.shape[1]
    top_k = torch.tensor([min(params.top_k, vocab) for params in rows.params], device=rows.logits.device)
    greatest = rows.logits.topk(max(int(top_k.max()), 1), dim=-1).values
    return greatest.gather(-1, (top_k - 1).clamp(min=0)[:, None])[:, 0].where(top_k > 0, -torch.inf)


def _floors_among(
    likely: LikelyTokens, least: Tensor, params: Sequence[SamplingParams], vocab: int, floor: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Floors from the likeliest tokens of each row, and [rows] bool: whether these sufficed.

    Args:
        likely: all tokens with logits of at least ``least`` [rows].
        params: one per row.
        floor: [rows], by min-p.
        total: [rows] int64, the masses of the whole rows.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=floor.device)

    top_k = column([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], torch.int64)
    top_p = column([p.top_p for p in params], torch.float64)
    unfiltered = column([p.top_k <= 0 and p.min_p == 0.0 for p in params], torch.bool)
    row, count, order = likely.row, likely.count, _descending(likely)
    logit, begin = likely.logit[order], count.cumsum(0) - count

    def sums(values: Tensor) -> Tensor:
        return torch.zeros_like(count).scatter_add_(0, row, values.to(torch.int64))

    allowed = (torch.arange(len(row), device=row.device) - begin[row] < top_k[row]) & (logit >= floor[row])
    mass = likely.mass[order] * allowed
    seen_all = (floor >= least) | (top_k <= count)  # no token outside can be allowed
    allowed_mass = sums(mass)
    # Sums over all rows may wrap around; the differences within a row are still right.
    before = mass.cumsum(0) - mass - (allowed_mass.cumsum(0) - allowed_mass)[row]
    total = torch.where(unfiltered & ~seen_all, total, allowed_mass)
    num_kept = sums(allowed & (before < (top_p * total)[row]))  # a token is kept while those before it do not suffice
    known = seen_all | (unfiltered & (allowed_mass >= top_p * total))
    return logit[begin + num_kept.clamp(min=1) - 1], known


def _descending(likely: LikelyTokens) -> Tensor:
    """[n]: the order of the tokens by row and, within a row, the likeliest first."""
    bits = likely.logit.view(torch.int32)
    rank = 0x7FFFFFFF - (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)  # floats of either sign, in reverse
    key = likely.row << 32 | rank
    if key.device.type != "cpu":
        return key.argsort()
    return torch.from_numpy(np.argsort(key.numpy()))  # vectorised: faster than torch's
