"""Which tokens may be drawn. Every filter becomes a floor: the least logit that a token of the row may have.

Tokens of equal logits share their fate, so a floor does not depend on how a sort orders them. Masses are summed as
integers, which is exact, so it does not depend on the order or the shape of the sum either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from producer.sampling import SamplingParams

MASS_BITS = 40  # a probability weight w <= 1 is the integer w * 2**40; a vocabulary of 2**22 tokens still fits in int64
_SORTED_TOKENS = (64, 1024)  # how many of the likeliest tokens are looked at, before the whole vocabulary is


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows to be sampled, with their settings as columns.

    Attributes:
        logits: [rows, vocab] float32, no NaN, no +inf.
        top: [rows] float32, the greatest logit of each row, finite.
        temperature: [rows] float32, > 0.
        params: one a row.
    """

    logits: torch.Tensor
    top: torch.Tensor
    temperature: torch.Tensor
    params: Sequence[SamplingParams]

    def select(self, rows: Sequence[int]) -> SampledRows:
        """These rows alone."""
        if len(rows) == len(self.params):
            return self
        index = torch.tensor(rows, device=self.logits.device)
        return SampledRows(self.logits[index], self.top[index], self.temperature[index], [self.params[row] for row in rows])

    def weights(self, values: torch.Tensor) -> torch.Tensor:
        """``exp((values - top) / temperature)``, 1 for the likeliest token; ``values`` is [rows, n]."""
        return values.sub(self.top[:, None]).div_(self.temperature[:, None]).exp_()

    def total_mass(self) -> torch.Tensor:
        """[rows] int64: the mass of the whole row."""
        scaled = self.logits
        if any(params.temperature != 1.0 for params in self.params):
            scaled = scaled.sub(self.top[:, None]).div_(self.temperature[:, None])
        likeliest = torch.softmax(scaled, dim=-1).amax(-1).to(torch.float64)  # softmax reduces each row by itself
        return (2.0**MASS_BITS / likeliest).to(torch.int64)

    def column(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """[rows, 1]: one setting a row."""
        return torch.tensor(values, dtype=dtype, device=self.logits.device)[:, None]


def as_mass(weights: torch.Tensor) -> torch.Tensor:
    """Weights of at most 1 as int64 masses."""
    return (weights.to(torch.float64) * 2.0**MASS_BITS).to(torch.int64)


def floors(rows: SampledRows) -> torch.Tensor:
    """[rows] float32: the least logit allowed by min-p, top-k and top-p, each over what the one before left.

    Min-p (Nguyen et al. 2024) keeps tokens at least that share as likely as the likeliest. Top-k keeps the k likeliest and
    their ties. Top-p (nucleus, Holtzman et al. 2020) keeps the smallest set of the likeliest whose renormalised mass reaches p.
    """
    floor = _min_p_floors(rows)
    pending = [row for row, params in enumerate(rows.params) if params.top_k > 0 or params.top_p < 1.0]
    vocab = rows.logits.shape[1]
    for size in (*(s for s in _SORTED_TOKENS if s < vocab), vocab):
        if not pending:
            break
        selected = rows.select(pending)
        index = torch.tensor(pending, device=floor.device)
        found, known = _sorted_floors(selected, floor[index], size)
        floor[index] = torch.where(known, found, floor[index])
        pending = [row for row, done in zip(pending, known.tolist(), strict=True) if not done]
    return floor


def _min_p_floors(rows: SampledRows) -> torch.Tensor:
    logs = [math.log(params.min_p) if params.min_p > 0.0 else -math.inf for params in rows.params]
    return rows.top + rows.temperature * rows.column(logs, torch.float32)[:, 0]


def _sorted_floors(rows: SampledRows, floor: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floors out of the ``size`` likeliest tokens of each row, and [rows] bool: whether they sufficed."""
    vocab = rows.logits.shape[1]
    values = _greatest(rows.logits, size)
    top_k = [min(params.top_k, vocab) if params.top_k > 0 else vocab for params in rows.params]
    ranks = torch.arange(size, device=values.device)
    allowed = (ranks < rows.column(top_k, torch.int64)) & (values >= floor[:, None])
    mass = as_mass(rows.weights(values)) * allowed
    reached = mass.cumsum(-1)
    seen_all = ~allowed[:, -1] | (rows.column(top_k, torch.int64)[:, 0] <= size)
    total = reached[:, -1].clone()
    unfiltered = torch.tensor([p.top_k <= 0 and p.min_p == 0.0 for p in rows.params], device=values.device)
    open_rows = (unfiltered & ~seen_all).nonzero()[:, 0].tolist()
    if open_rows:
        total[open_rows] = rows.select(open_rows).total_mass()
    top_p = rows.column([params.top_p for params in rows.params], torch.float64)
    kept = allowed & ((reached - mass) < top_p * total[:, None])  # a token is in while those before it do not suffice
    known = seen_all | (unfiltered & ~kept[:, -1])
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    return values.gather(-1, last)[:, 0], known


def _greatest(logits: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, size]: the greatest values of each row, descending."""
    if size <= _SORTED_TOKENS[0] or logits.device.type != "cpu":
        return logits.topk(size, dim=-1).values
    ascending = np.sort(logits.numpy(), axis=-1)  # vectorised: faster than torch's selection of some hundreds
    return torch.from_numpy(ascending[:, : -size - 1 : -1].copy())
