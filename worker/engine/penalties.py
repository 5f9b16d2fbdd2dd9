"""Adjustments of the logits before a token is chosen: bias, minimum length, and the three penalties.

Only the affected entries are read and written: each request's token ids and counts are kept up to date as
tokens come, so the cost of a step is that of the new tokens, not of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.request import UNKNOWN_TOKEN, Request
from worker.engine.unread import UnreadTokens, to_device

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]


def penalises(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjusts(request: Request) -> bool:
    """Whether the request's logits are changed at this step."""
    params = request.params
    return bool(params.logit_bias) or penalises(params) or len(request.output_token_ids) < params.min_tokens


class TokenCounts:
    """The distinct tokens of one request, each with its number of occurrences in the output (0: in the prompt only).

    Kept in `Request.token_counts`; built from prompt and output when first needed, so it is right after a resume.
    """

    def __init__(self, request: Request) -> None:
        prompt = dict.fromkeys(request.prompt_token_ids) if request.params.repetition_penalty != 1.0 else {}
        self._index = {token: i for i, token in enumerate(prompt)}
        self._size = len(self._index)
        self._ids = np.fromiter(self._index, np.int64, self._size)
        self._counts = np.zeros(self._size, np.float32)
        self._num_counted = 0
        self.catch_up(request.output_token_ids)

    @property
    def token_ids(self) -> _Ints:
        return self._ids[: self._size]

    @property
    def counts(self) -> _Floats:
        return self._counts[: self._size]

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that came since the last call, except one that is unread."""
        for token in output_token_ids[self._num_counted :]:
            if token == UNKNOWN_TOKEN:
                break
            index = self._index.setdefault(token, self._size)
            if index == self._size:
                self._append(token)
            self._counts[index] += 1.0
            self._num_counted += 1

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[self._size] = token
        self._size += 1


def adjust_logits(logits: Tensor, requests: Sequence[Request], unread: UnreadTokens | None = None) -> None:
    """Apply, in place: ``logit_bias``; then ``min_tokens``, which forbids every stop token; then the penalties.

    Bias before penalties is vLLM's order. The repetition penalty divides positive and multiplies negative logits of
    tokens seen in prompt or output (CTRL, Keskar et al. 2019); frequency and presence count only the output (OpenAI).

    Args:
        logits: [rows, vocab] float32, row i of ``requests[i]``. Each row's result depends only on that row.
        unread: tokens that count too, although the host does not know them yet.
    """
    _add_bias(logits, requests)
    _forbid_stop_tokens(logits, requests)
    _penalise(logits, [(row, request) for row, request in enumerate(requests) if penalises(request.params)], unread)


def _add_bias(logits: Tensor, requests: Sequence[Request]) -> None:
    biased = [(row * logits.shape[1] + token, bias) for row, r in enumerate(requests) for token, bias in r.params.logit_bias.items()]
    if biased:
        index = to_device([i for i, _ in biased], torch.int64, logits.device)
        logits.view(-1)[index] += to_device([b for _, b in biased], torch.float32, logits.device)


def _forbid_stop_tokens(logits: Tensor, requests: Sequence[Request]) -> None:
    forbidden = [
        row * logits.shape[1] + token
        for row, r in enumerate(requests)
        if len(r.output_token_ids) < r.params.min_tokens
        for token in {*r.eos_token_ids, *r.params.stop_token_ids}
    ]
    if forbidden:
        logits.view(-1).index_fill_(0, to_device(forbidden, torch.int64, logits.device), -torch.inf)


class _Counted(NamedTuple):
    """Tokens to be penalised, one per entry.

    Attributes:
        place: of its request among those with penalties, int64.
        token_ids: int64.
        counts: float32, of the token in the output.
    """

    place: Tensor
    token_ids: Tensor
    counts: Tensor


def _penalise(logits: Tensor, penalised: Sequence[tuple[int, Request]], unread: UnreadTokens | None) -> None:
    if not penalised:
        return
    counted = _counted([request for _, request in penalised], logits.device)
    if unread is not None:
        counted = _count_unread(counted, [row for row, _ in penalised], unread)

    def per_token(setting: Callable[[SamplingParams], float]) -> Tensor:
        return to_device([setting(request.params) for _, request in penalised], torch.float32, logits.device)[counted.place]

    starts = to_device([row * logits.shape[1] for row, _ in penalised], torch.int64, logits.device)
    flat, index = logits.view(-1), starts[counted.place] + counted.token_ids
    values = flat[index]
    repetition = per_token(lambda p: p.repetition_penalty)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counted.counts * per_token(lambda p: p.frequency_penalty)
    values -= (counted.counts > 0) * per_token(lambda p: p.presence_penalty)
    flat[index] = values


def _counted(requests: Sequence[Request], device: torch.device) -> _Counted:
    """The tokens that the host knows."""
    counts = [_counts_of(request) for request in requests]
    place = np.repeat(np.arange(len(requests)), [len(c.token_ids) for c in counts])
    token_ids = to_device(np.concatenate([c.token_ids for c in counts]), torch.int64, device)
    numbers = to_device(np.concatenate([c.counts for c in counts]), torch.float32, device)
    return _Counted(to_device(place, torch.int64, device), token_ids, numbers)


def _count_unread(counted: _Counted, rows: Sequence[int], unread: UnreadTokens) -> _Counted:
    """Count these rows' unread tokens too, each as one more entry; a known token is then there twice, with equal counts."""
    place_of, device = {row: place for place, row in enumerate(rows)}, unread.token_ids.device
    known = [(place_of[row], i) for i, row in enumerate(unread.rows) if row in place_of]
    if not known:
        return counted
    place = to_device([place for place, _ in known], torch.int64, device)
    token_ids = unread.token_ids[to_device([i for _, i in known], torch.int64, device)]
    last = torch.full((len(rows),), UNKNOWN_TOKEN, device=device).index_copy_(0, place, token_ids)
    is_last = counted.token_ids == last[counted.place]
    before = counted.counts.new_zeros(len(rows)).index_add_(0, counted.place, counted.counts * is_last)
    added = _Counted(place, token_ids, before[place] + 1)
    counted = counted._replace(counts=counted.counts + is_last)
    return _Counted(*(torch.cat(pair) for pair in zip(counted, added, strict=True)))


def _counts_of(request: Request) -> TokenCounts:
    if request.token_counts is None:
        request.token_counts = TokenCounts(request)
    counts: TokenCounts = request.token_counts
    counts.catch_up(request.output_token_ids)
    return counts
