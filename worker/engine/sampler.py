"""Chooses the next tokens of a batch. Each row depends on its own logits and request alone, bit for bit.

Order, as in vLLM: bias, minimum length, penalties (`penalties`); then greedy, or temperature, min-p, top-k, top-p
(`filters`) and a draw by the Gumbel-max trick with noise that is a function of (seed, position, token) (`noise`).
Log-probabilities are of the model's own distribution, before all of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from producer.sampling import MAX_LOGPROBS, SamplingParams
from producer.wire import TokenLogprob
from worker.engine.filters import MASS_BITS, SampledRows, as_mass, floors
from worker.engine.noise import TAIL_TOKEN, gumbel, row_key
from worker.engine.penalties import adjust_logits, adjusts
from worker.engine.request import Request, Sampled

MIN_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as at 0
_HEAD_NATS = 8.0  # without a filter, tokens within this of the likeliest are drawn one by one, the others as one tail
FAILED = Sampled(error_code="BATCH_FAILED")


class Sampler:
    """Chooses a token for each row of logits; holds nothing between calls (what it counts is in the requests)."""

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """Sample the token at position ``num_tokens`` of each request.

        Args:
            logits: [rows, vocab], float32, float16 or bfloat16, on any device; row i of ``requests[i]``. Not written to.

        Returns:
            One `Sampled` a row. A row with a NaN, a +inf or nothing finite has ``error_code`` BATCH_FAILED; its neighbours are unharmed.
        """
        assert len(requests) == logits.shape[0]
        if not requests:
            return []
        top, likeliest = logits.max(dim=-1)  # a NaN is greater than all, so the maximum tells of every bad value
        good = torch.isfinite(top).tolist()
        token_ids: list[int] = likeliest.tolist()
        others = [row for row, request in enumerate(requests) if good[row] and not _plainly_greedy(request)]
        if others:
            selected = _select(logits, others)
            for row, token in zip(others, _choose(selected, [requests[row] for row in others]), strict=True):
                token_ids[row] = token
        wanted = [row for row, request in enumerate(requests) if good[row] and request.params.logprobs is not None]
        logprobs = _logprobs(_select(logits, wanted), [(requests[row], token_ids[row]) for row in wanted]) if wanted else []
        by_row = dict(zip(wanted, logprobs, strict=True))
        return [Sampled(token, by_row.get(row)) if good[row] else FAILED for row, token in enumerate(token_ids)]


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def _plainly_greedy(request: Request) -> bool:
    return _greedy(request.params) and request.grammar is None and not adjusts(request)


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows as float32; the logits themselves where that is all of them."""
    if len(rows) < logits.shape[0]:
        logits = logits[torch.tensor(rows, device=logits.device)]
    return logits.float()


def _choose(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    if any(adjusts(request) for request in requests):
        logits = logits.clone()
        adjust_logits(logits, requests)
    top, likeliest = logits.max(dim=-1)
    token_ids: list[int] = likeliest.tolist()
    drawn = [row for row, request in enumerate(requests) if not _greedy(request.params)]
    if drawn:
        params = [requests[row].params for row in drawn]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
        index = torch.tensor(drawn, device=logits.device)
        rows = SampledRows(_select(logits, drawn), top[index], temperature, params)
        keys = torch.tensor([row_key(requests[row].seed, requests[row].num_tokens) for row in drawn], device=logits.device)
        for row, token in zip(drawn, _draw(rows, keys), strict=True):
            token_ids[row] = token
    return token_ids


def _draw(rows: SampledRows, keys: torch.Tensor) -> list[int]:
    """Draw a token a row from the softmax over the tokens that the filters leave.

    Where no filter is on, the unlikely tokens compete as one: the greatest of their noisy logits is itself a Gumbel
    variable at the logarithm of their mass. Only where it wins, one of them is drawn. So noise is made for few tokens.
    """
    floor = floors(rows)
    unfiltered = [row for row, params in enumerate(rows.params) if params.top_p == 1.0 and params.top_k <= 0 and params.min_p == 0.0]
    if unfiltered:
        index = torch.tensor(unfiltered, device=floor.device)
        floor[index] = rows.top[index] - _HEAD_NATS * rows.temperature[index]
    allowed = rows.logits >= floor[:, None]
    token_ids, best, mass = _gumbel_max(rows, keys, allowed)
    if unfiltered:
        tail = (rows.select(unfiltered).total_mass() - mass[index]).clamp_(min=0)
        tail_best = (tail.double() * 2.0**-MASS_BITS).log().float() + gumbel(keys[index], torch.full_like(index, TAIL_TOKEN))
        for row in index[tail_best > best[index]].tolist():
            token_ids[row] = _draw_unlikely(rows.select([row]), keys[row : row + 1], ~allowed[row : row + 1], token_ids[row])
    return token_ids


def _draw_unlikely(row: SampledRows, key: torch.Tensor, allowed: torch.Tensor, otherwise: int) -> int:
    """One of the tail's tokens; ``otherwise`` where every one of them is impossible (rounding gave the tail its mass)."""
    (token_id,), best, _ = _gumbel_max(row, key, allowed)
    return token_id if bool(best[0] > -torch.inf) else otherwise


def _gumbel_max(rows: SampledRows, keys: torch.Tensor, allowed: torch.Tensor) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The allowed token of each row with the greatest noisy logit, the least id among equals.

    Returns:
        token ids; [rows] float32, the winners' noisy logits; [rows] int64, the mass of the allowed tokens.
    """
    row, token = allowed.nonzero(as_tuple=True)
    logit = (rows.logits[row, token] - rows.top[row]) / rows.temperature[row]
    noisy = logit + gumbel(keys[row], token)
    best = torch.full_like(rows.top, -torch.inf).scatter_reduce_(0, row, noisy, "amax")
    winners = (noisy == best[row]).nonzero()[:, 0]
    chosen = torch.full_like(row[:1], rows.logits.shape[1]).repeat(len(rows.params))
    chosen.scatter_reduce_(0, row[winners], token[winners], "amin")
    mass = torch.zeros_like(chosen).scatter_add_(0, row, as_mass(logit.exp()))
    return chosen.tolist(), best, mass


def _logprobs(logits: torch.Tensor, chosen: Sequence[tuple[Request, int]]) -> list[TokenLogprob]:
    """Log-probabilities of the chosen tokens and of the likeliest, from logits [rows, vocab] float32."""
    logprobs = torch.log_softmax(logits, dim=-1)  # reduces each row by itself
    picked = logprobs.gather(-1, torch.tensor([[token] for _, token in chosen], device=logits.device))[:, 0].tolist()
    most = min(MAX_LOGPROBS, logits.shape[1])
    tops = _likeliest(logprobs, most) if any(request.params.logprobs for request, _ in chosen) else [[]] * len(chosen)
    return [
        TokenLogprob(token, value, dict(top[: request.params.logprobs]))
        for (request, token), value, top in zip(chosen, picked, tops, strict=True)
    ]


def _likeliest(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row (token id, log-probability) of the ``count`` likeliest, likeliest first, the least id among equals."""
    least = logprobs.topk(count, dim=-1).values[:, -1:]
    rows, tokens = (logprobs >= least).nonzero(as_tuple=True)
    found: list[list[tuple[int, float]]] = [[] for _ in range(logprobs.shape[0])]
    for row, token, value in zip(rows.tolist(), tokens.tolist(), logprobs[rows, tokens].tolist(), strict=True):
        found[row].append((token, value))
    return [sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:count] for entries in found]
