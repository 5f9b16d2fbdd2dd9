"""Adjustments of the logits before a token is chosen: bias, minimum length, and the three penalties.

Only the affected entries are read and written: each request's token ids and counts are kept up to date as
tokens come, so the cost of a step is that of the new tokens, not of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from producer.sampling import SamplingParams
from worker.engine.request import Request

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
        """Count the output tokens that came since the last call."""
        for token in output_token_ids[self._num_counted :]:
            index = self._index.setdefault(token, self._size)
            if index == self._size:
                self._append(token)
            self._counts[index] += 1.0
        self._num_counted = len(output_token_ids)

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[self._size] = token
        self._size += 1


def adjust_logits(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Apply, in place: ``logit_bias``; then ``min_tokens``, which forbids every stop token; then the penalties.

    Bias before penalties is vLLM's order. The repetition penalty divides positive and multiplies negative logits of
    tokens seen in prompt or output (CTRL, Keskar et al. 2019); frequency and presence count only the output (OpenAI).

    Args:
        logits: [rows, vocab] float32, row i of ``requests[i]``. Each row's result depends only on that row.
    """
    _add_bias(logits, requests)
    _forbid_stop_tokens(logits, requests)
    _penalise(logits, [(row, request) for row, request in enumerate(requests) if penalises(request.params)])


def _add_bias(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    biased = [(row * logits.shape[1] + token, bias) for row, r in enumerate(requests) for token, bias in r.params.logit_bias.items()]
    if biased:
        index = torch.tensor([i for i, _ in biased], device=logits.device)
        logits.view(-1)[index] += torch.tensor([b for _, b in biased], dtype=torch.float32, device=logits.device)


def _forbid_stop_tokens(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    forbidden = [
        row * logits.shape[1] + token
        for row, r in enumerate(requests)
        if len(r.output_token_ids) < r.params.min_tokens
        for token in {*r.eos_token_ids, *r.params.stop_token_ids}
    ]
    if forbidden:
        logits.view(-1)[torch.tensor(forbidden, device=logits.device)] = -torch.inf


def _penalise(logits: torch.Tensor, rows: Sequence[tuple[int, Request]]) -> None:
    if not rows:
        return
    counted = [_counts_of(request) for _, request in rows]
    lengths = [len(counts.token_ids) for counts in counted]
    index = _to(logits, np.concatenate([c.token_ids + row * logits.shape[1] for (row, _), c in zip(rows, counted, strict=True)]))
    counts = _to(logits, np.concatenate([c.counts for c in counted]))

    def per_token(setting: Callable[[SamplingParams], float]) -> torch.Tensor:
        values = np.array([setting(request.params) for _, request in rows], np.float32)
        return _to(logits, np.repeat(values, lengths))

    flat = logits.view(-1)
    values = flat[index]
    repetition = per_token(lambda p: p.repetition_penalty)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * per_token(lambda p: p.frequency_penalty)
    values -= (counts > 0) * per_token(lambda p: p.presence_penalty)
    flat[index] = values


def _counts_of(request: Request) -> TokenCounts:
    if request.token_counts is None:
        request.token_counts = TokenCounts(request)
    counts: TokenCounts = request.token_counts
    counts.catch_up(request.output_token_ids)
    return counts


def _to(logits: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device)
