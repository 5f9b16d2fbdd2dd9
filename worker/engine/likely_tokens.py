"""The likely tokens of distributions over the vocabulary: a few hold nearly all of the mass, and decide nearly every draw.

They are found once, so that the others need neither noise nor a sort.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.native.library import LikelyTokensStruct, kernels

LIKELY_NATS = 10.0  # without a filter, tokens within this of the likeliest are drawn individually, the others as one tail
MASS_BITS = 40  # a probability weight w <= 1 is the integer w * 2**40; a vocabulary of 2**22 tokens still fits in int64


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows to be sampled, with their settings as columns.

    Attributes:
        logits: [rows, vocab] float32, no NaN, no +inf.
        top: [rows] float32, the greatest logit of each row, finite.
        temperature: [rows] float32, > 0.
        params: one per row.
    """

    logits: Tensor
    top: Tensor
    temperature: Tensor
    params: Sequence[SamplingParams]

    def select(self, rows: Sequence[int]) -> SampledRows:
        """Only these rows."""
        if len(rows) == len(self.params):
            return self
        index = torch.tensor(rows, device=self.logits.device)
        return SampledRows(self.logits[index], self.top[index], self.temperature[index], [self.params[row] for row in rows])

    def weights(self, values: Tensor) -> Tensor:
        """``exp((values - top) / temperature)``, 1 for the likeliest token; ``values`` is [rows, n]."""
        return values.sub(self.top[:, None]).div_(self.temperature[:, None]).exp_()


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """Some tokens of each row, by row, then by id.

    Attributes:
        row, token: [n] int64.
        logit: [n] float32.
        mass: [n] int64.
        count: [rows] int64, how many there are of each row.
        tail: [rows] int64, the mass of the row's other tokens.
    """

    row: Tensor
    token: Tensor
    logit: Tensor
    mass: Tensor
    count: Tensor
    tail: Tensor

    def at_least(self, floor: Tensor) -> LikelyTokens:
        """Only the tokens with logits of at least ``floor`` [rows]; ``tail`` does not change."""
        kept = self.logit >= floor[self.row]
        row = self.row[kept]
        return LikelyTokens(
            row, self.token[kept], self.logit[kept], self.mass[kept], torch.bincount(row, minlength=len(self.count)), self.tail
        )

    def select(self, rows: Sequence[int]) -> LikelyTokens:
        """Only the tokens of these rows, which must be ascending."""
        if len(rows) == len(self.count):
            return self
        index = torch.tensor(rows, device=self.row.device)
        place = torch.full_like(self.count, -1)
        place[index] = torch.arange(len(rows), device=self.row.device)
        kept = place[self.row] >= 0
        row = place[self.row[kept]]
        return LikelyTokens(row, self.token[kept], self.logit[kept], self.mass[kept], self.count[index], self.tail[index])

    def total_mass(self) -> Tensor:
        """[rows] int64: the masses of the whole rows."""
        return self.tail.scatter_add(0, self.row, self.mass)


def as_mass(weights: Tensor) -> Tensor:
    """Weights as int64 masses, whose sums are exact, whatever their order and shape."""
    return (weights.to(torch.float64) * 2.0**MASS_BITS).to(torch.int64)


def find_likely_tokens(rows: SampledRows, floor: Tensor) -> LikelyTokens:
    """The tokens with logits of at least ``floor`` [rows]."""
    lib = kernels() if rows.logits.device.type == "cpu" else None
    return find_with_torch(rows, floor) if lib is None else find_natively(lib, rows, floor)


def find_with_torch(rows: SampledRows, floor: Tensor) -> LikelyTokens:
    """`find_likely_tokens` on any device."""
    inside = rows.logits >= floor[:, None]
    row, token = inside.nonzero(as_tuple=True)
    mass = as_mass(rows.weights(rows.logits))
    return LikelyTokens(row, token, rows.logits[inside], mass[inside], inside.sum(-1), mass.masked_fill(inside, 0).sum(-1))


def find_natively(lib: ctypes.CDLL, rows: SampledRows, floor: Tensor) -> LikelyTokens:
    """`find_likely_tokens` by a kernel for the CPU."""
    num_rows, vocab = rows.logits.shape
    count, tail = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float64)
    logits, top, temperature, floor = (tensor.contiguous() for tensor in (rows.logits, rows.top, rows.temperature, floor))
    struct = LikelyTokensStruct(
        logits=logits.data_ptr(),
        top=top.data_ptr(),
        temperature=temperature.data_ptr(),
        floor=floor.data_ptr(),
        count=count.data_ptr(),
        tail=tail.data_ptr(),
        num_rows=num_rows,
        vocab=vocab,
    )
    threads = torch.get_num_threads()
    lib.headrace_measure_likely_tokens(ctypes.byref(struct), threads)
    num_tokens, begin = int(count.sum()), count.cumsum(0) - count
    token, logit, weight = (torch.empty(num_tokens, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    struct.begin, struct.tokens, struct.values, struct.weights = (tensor.data_ptr() for tensor in (begin, token, logit, weight))
    lib.headrace_list_likely_tokens(ctypes.byref(struct), threads)
    return LikelyTokens(torch.arange(num_rows).repeat_interleave(count), token, logit, as_mass(weight), count, as_mass(tail))
