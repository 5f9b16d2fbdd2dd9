"""Chooses tokens without the host waiting for the device, so that the next step can be launched before they are read.

The same rules as `sampler`, in a form without data-dependent shapes: every token of a row gets its noise, while `sampler` makes
noise for few. What needs the host (grammars, log-probabilities) is left to `sampler`; see `is_device_sampled`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.filters import is_unfiltered
from worker.engine.likely_tokens import LIKELY_NATS, MASS_BITS, SampledRows, as_mass
from worker.engine.noise import TAIL_TOKEN, gumbel, row_key
from worker.engine.penalties import adjust_logits, adjusts
from worker.engine.request import Request
from worker.engine.sampler import MIN_TEMPERATURE
from worker.engine.unread import UnreadTokens, to_device

_MOST_SELECTED = 1024  # a larger top-k sorts the whole vocabulary, as does top-p alone


class DeviceTokens(NamedTuple):
    """What was chosen, still on the device.

    Attributes:
        token_ids: ``[rows]`` int64.
        good: ``[rows]`` bool; False for a row with a NaN, a +inf or nothing finite, whose token means nothing.
    """

    token_ids: Tensor
    good: Tensor


def is_device_sampled(request: Request) -> bool:
    """Whether `sample_on_device` chooses this request's next token as `sampler.Sampler` would."""
    return request.grammar is None and request.params.logprobs is None


def sample_on_device(logits: Tensor, requests: Sequence[Request], unread: UnreadTokens | None = None) -> DeviceTokens:
    """Choose the token at position ``num_tokens`` of each request; nothing is read from the device.

    Args:
        logits: ``[rows, vocab]``, any float dtype. Not written to.
        requests: one per row, each `is_device_sampled`.
        unread: the last output tokens of those that end with `request.UNKNOWN_TOKEN`; penalties count them.
    """
    top, token_ids = logits.max(dim=-1)
    good = torch.isfinite(top)
    if any(map(adjusts, requests)):
        logits = logits.to(torch.float32, copy=True)
        adjust_logits(logits, requests, unread)
        top, token_ids = logits.max(dim=-1)
        good &= torch.isfinite(top)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature >= MIN_TEMPERATURE]
    if drawn:
        index = to_device(drawn, torch.int64, logits.device)
        selected = logits.float() if len(drawn) == len(requests) else logits[index].float()
        params = [requests[row].params for row in drawn]
        temperature = to_device([p.temperature for p in params], torch.float32, logits.device)
        keys = to_device([row_key(requests[row].seed, requests[row].num_tokens) for row in drawn], torch.int64, logits.device)
        token_ids = token_ids.index_copy(0, index, _draw(SampledRows(selected, top[index].float(), temperature, params), keys))
    return DeviceTokens(token_ids, good)


def _draw(rows: SampledRows, keys: Tensor) -> Tensor:
    """Gumbel-max over the tokens that the filters leave, ``[rows]``; see `sampler._draw` for the tail of rows without a filter."""
    device = rows.logits.device
    unfiltered = to_device([is_unfiltered(p) for p in rows.params], torch.bool, device)
    floor = torch.where(unfiltered, rows.top - LIKELY_NATS * rows.temperature, _floors(rows))
    allowed = rows.logits >= floor[:, None]
    scaled = (rows.logits - rows.top[:, None]) / rows.temperature[:, None]
    noisy = scaled + gumbel(keys[:, None], torch.arange(rows.logits.shape[1], device=device)[None, :])
    best, token_ids = noisy.masked_fill(~allowed, -torch.inf).max(dim=-1)
    if not any(is_unfiltered(p) for p in rows.params):
        return token_ids
    tail = as_mass(scaled.exp()).masked_fill_(allowed, 0).sum(-1)
    tail_noise = gumbel(keys, torch.full_like(keys, TAIL_TOKEN))
    tail_best = (tail.double() * 2.0**-MASS_BITS).log().float() + tail_noise
    unlikely_best, unlikely = noisy.masked_fill(allowed, -torch.inf).max(dim=-1)
    return torch.where(unfiltered & (tail_best > best) & (unlikely_best > -torch.inf), unlikely, token_ids)


def _floors(rows: SampledRows) -> Tensor:
    """``[rows]``: the least logit that min-p, top-k and top-p allow; see `filters.floors`."""
    device, params = rows.logits.device, rows.params
    min_p = to_device([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], torch.float32, device)
    floor = rows.top + rows.temperature * min_p
    for part, size in _ranked(params, rows.logits.shape[1]):
        index = to_device(part, torch.int64, device)
        ranked = SampledRows(rows.logits[index], rows.top[index], rows.temperature[index], [params[row] for row in part])
        floor = floor.index_copy(0, index, _ranked_floors(ranked, floor[index], size))
    return floor


def _ranked(params: Sequence[SamplingParams], vocab: int) -> Iterator[tuple[list[int], int]]:
    """Rows with a filter by rank, and how many of their greatest logits it needs: those with a small top-k, then the others."""
    few = [row for row, p in enumerate(params) if 0 < p.top_k <= _MOST_SELECTED]
    if few:
        yield few, min(vocab, 1 << (max(params[row].top_k for row in few) - 1).bit_length())
    whole = [row for row, p in enumerate(params) if p.top_k > _MOST_SELECTED or (p.top_k <= 0 and p.top_p < 1.0)]
    if whole:
        yield whole, vocab


def _ranked_floors(rows: SampledRows, floor: Tensor, size: int) -> Tensor:
    """``[rows]``: ``floor`` raised by top-k and top-p, from the ``size`` greatest logits of each row."""
    device, vocab = rows.logits.device, rows.logits.shape[1]
    values = rows.logits.topk(size, dim=-1).values if size < vocab else rows.logits.sort(dim=-1, descending=True).values
    top_k = to_device([p.top_k if p.top_k > 0 else vocab for p in rows.params], torch.int64, device)[:, None]
    top_p = to_device([p.top_p for p in rows.params], torch.float64, device)[:, None]
    allowed = (torch.arange(size, device=device) < top_k) & (values >= floor[:, None])
    mass = as_mass(rows.weights(values)) * allowed
    reached = mass.cumsum(-1)
    kept = allowed & ((reached - mass) < top_p * reached[:, -1:])
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    return values.gather(-1, last)[:, 0]
