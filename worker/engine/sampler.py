"""Chooses the next tokens of a batch. Each row depends only on its own logits and request, bit for bit.

Order, as in vLLM: bias, minimum length, penalties (`penalties`), grammar (`structured`); then greedy, or temperature, min-p, top-k, top-p
(`filters`) and a draw by the Gumbel-max trick with noise that is a function of (seed, position, token) (`noise`).
Log-probabilities are those of the model's own distribution, before all of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from producer.sampling import MAX_LOGPROBS
from producer.wire import TokenLogprob
from worker.engine.filters import floors, is_unfiltered
from worker.engine.likely_tokens import LIKELY_NATS, MASS_BITS, SampledRows, find_likely_tokens
from worker.engine.noise import TAIL_TOKEN, gumbel, row_key
from worker.engine.penalties import adjust_logits, adjusts
from worker.engine.request import Request
from worker.engine.step import Sampled
from worker.engine.structured import forbid_tokens

MIN_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as at 0
_NO_TOKEN = -1
FAILED = Sampled(error_code="BATCH_FAILED")


class Sampler:
    """Chooses a token for each row of logits; keeps no state between calls (counts are in the requests)."""

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """Sample the token at position ``num_tokens`` of each request.

        Args:
            logits: [rows, vocab], float32, float16 or bfloat16, on any device; row i of ``requests[i]``. Not written to.

        Returns:
            One `Sampled` per row. A row with a NaN, a +inf or nothing finite has ``error_code`` BATCH_FAILED; the others are not affected.
        """
        assert len(requests) == logits.shape[0]
        if not requests:
            return []
        top, token_ids = logits.amax(dim=-1), [_NO_TOKEN] * len(requests)
        good = _finite(top)
        adjusted = [row for row in good if _adjusted(requests[row])]
        if adjusted:
            _put(token_ids, adjusted, _choose_adjusted(_select(logits, adjusted), [requests[row] for row in adjusted]))
        done = set(adjusted)
        _choose(token_ids, logits, top, requests, [row for row in good if row not in done])
        logprobs = _logprobs_by_row(logits, requests, token_ids)
        return [FAILED if token == _NO_TOKEN else Sampled(token, logprobs.get(row)) for row, token in enumerate(token_ids)]


def takes_likeliest(request: Request) -> bool:
    """Whether this request needs only the index of its largest logit."""
    return _greedy(request) and not _adjusted(request) and request.params.logprobs is None


def _greedy(request: Request) -> bool:
    return request.params.temperature < MIN_TEMPERATURE


def _adjusted(request: Request) -> bool:
    return request.grammar is not None or adjusts(request)


def _select(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows as float32; the values themselves if that is all rows."""
    if len(rows) < values.shape[0]:
        values = values[torch.tensor(rows, device=values.device)]
    return values.float()


def _put(token_ids: list[int], rows: Sequence[int], chosen: Sequence[int]) -> None:
    for row, token_id in zip(rows, chosen, strict=True):
        token_ids[row] = token_id


def _choose_adjusted(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose, greedily or not, from adjusted logits; ``logits`` [rows, vocab] float32. `_NO_TOKEN` if all tokens are forbidden."""
    logits = logits.clone()
    adjust_logits(logits, requests)
    forbid_tokens(logits, [request.grammar for request in requests])
    top, token_ids = logits.amax(dim=-1), [_NO_TOKEN] * len(requests)
    _choose(token_ids, logits, top, requests, _finite(top))
    return token_ids


def _finite(top: torch.Tensor) -> list[int]:
    """The rows that can be sampled, by their maxima: a NaN counts as the maximum, so these reveal every bad value."""
    return [row for row, finite in enumerate(torch.isfinite(top).tolist()) if finite]


def _choose(token_ids: list[int], logits: torch.Tensor, top: torch.Tensor, requests: Sequence[Request], rows: Sequence[int]) -> None:
    """Fill in the tokens of these rows."""
    greedy = [row for row in rows if _greedy(requests[row])]
    if greedy:
        _put(token_ids, greedy, _select(logits, greedy).argmax(-1).tolist())
    drawn = [row for row in rows if not _greedy(requests[row])]
    if drawn:
        _put(token_ids, drawn, _draw(_select(logits, drawn), _select(top, drawn), [requests[row] for row in drawn]))


def _draw(logits: torch.Tensor, top: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Draw one token per row from the softmax over the tokens that the filters leave.

    Without a filter, the unlikely tokens compete as one: the greatest of their noisy logits is itself a Gumbel
    variable at the logarithm of their mass. Only if it wins, one of them is drawn, so noise is made for few tokens.
    """
    params = [request.params for request in requests]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    rows = SampledRows(logits, top, temperature, params)
    keys = torch.tensor([row_key(request.seed, request.num_tokens) for request in requests], device=logits.device)
    unfiltered = [row for row, p in enumerate(params) if is_unfiltered(p)]
    index = torch.tensor(unfiltered, dtype=torch.int64, device=logits.device)
    likely_floor = top - LIKELY_NATS * temperature
    likely = find_likely_tokens(rows, likely_floor)
    if len(unfiltered) < len(params):
        floor = floors(rows, likely).index_copy_(0, index, likely_floor[index])
        likely = likely.at_least(floor) if bool((floor >= likely_floor).all()) else find_likely_tokens(rows, floor)
    token_ids, best = _gumbel_max(rows, keys, likely.row, likely.token, likely.logit)
    tail_best = (likely.tail[index].double() * 2.0**-MASS_BITS).log().float() + gumbel(keys[index], torch.full_like(index, TAIL_TOKEN))
    won = index[tail_best > best[index]].tolist()
    if won:
        unlikely = rows.logits[won] < likely_floor[won, None]
        _put(token_ids, won, _draw_unlikely(rows.select(won), keys[won], unlikely, [token_ids[row] for row in won]))
    return token_ids


def _draw_unlikely(rows: SampledRows, keys: torch.Tensor, allowed: torch.Tensor, otherwise: Sequence[int]) -> list[int]:
    """One of the tail's tokens per row; ``otherwise`` if all of them are impossible (the tail's mass came from rounding)."""
    row, token = allowed.nonzero(as_tuple=True)
    token_ids, best = _gumbel_max(rows, keys, row, token, rows.logits[allowed])
    possible = (best > -torch.inf).tolist()
    return [token_ids[row] if possible[row] else otherwise[row] for row in range(len(otherwise))]


def _gumbel_max(
    rows: SampledRows, keys: torch.Tensor, row: torch.Tensor, token: torch.Tensor, logit: torch.Tensor
) -> tuple[list[int], torch.Tensor]:
    """For each row the token with the greatest noisy logit, the least id among equals.

    Returns:
        token ids; [rows] float32, the winners' noisy logits.
    """
    noisy = (logit - rows.top[row]) / rows.temperature[row] + gumbel(keys[row], token)
    best = torch.full_like(rows.top, -torch.inf).scatter_reduce_(0, row, noisy, "amax")
    winners = noisy == best[row]
    chosen = torch.full((len(rows.params),), rows.logits.shape[1], device=row.device)
    chosen.scatter_reduce_(0, row[winners], token[winners], "amin")
    return chosen.tolist(), best


def _logprobs_by_row(logits: torch.Tensor, requests: Sequence[Request], token_ids: Sequence[int]) -> dict[int, TokenLogprob]:
    """The log-probabilities of the rows that want them."""
    wanted = [row for row, token in enumerate(token_ids) if token != _NO_TOKEN and requests[row].params.logprobs is not None]
    if not wanted:
        return {}
    chosen = [(requests[row], token_ids[row]) for row in wanted]
    return dict(zip(wanted, _logprobs(_select(logits, wanted), chosen), strict=True))


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
