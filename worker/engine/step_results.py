"""Which rows of a step's output are wanted, and what each request gets from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.engine.request import Request
from worker.engine.sampler import FAILED, takes_likeliest
from worker.engine.step import Sampled, ScheduledChunk

_SCORED_ROWS = 64  # rows of logits that are normalised in float32 at once

Sample = Callable[[Tensor, Sequence[Request]], list[Sampled]]


class _Scored(NamedTuple):
    """A chunk of kind ``score``: its logits rows, and the tokens that they predict."""

    chunk_index: int
    row: int
    targets: list[int]


class WantedRows:
    """Plans which rows need logits, then distributes the output.

    Args:
        token_starts: ``[B+1]``, where each chunk's tokens start in the step.

    Attributes:
        rows: the step's tokens whose logits are wanted: first those of requests that generate, then those to be scored.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk], token_starts: Sequence[int]) -> None:
        self._chunks = chunks
        self._token_starts = token_starts
        self._generating = [i for i, chunk in enumerate(chunks) if chunk.last and chunk.request.kind == "generate"]
        self.rows: list[int] = [token_starts[i + 1] - 1 for i in self._generating]
        self._scored = [self._plan_score(i, chunk) for i, chunk in enumerate(chunks) if chunk.request.kind == "score"]
        self._embedded = [i for i, chunk in enumerate(chunks) if chunk.request.kind == "embed"]

    def only_likeliest(self) -> bool:
        """Whether only the index of each row's largest logit is wanted."""
        return not self._scored and all(takes_likeliest(self._chunks[i].request) for i in self._generating)

    def _plan_score(self, chunk_index: int, chunk: ScheduledChunk) -> _Scored:
        """The row at position p predicts the token at p+1; tokens from ``score_start`` on count."""
        request = chunk.request
        begin = max(chunk.start, request.score_start - 1)
        end = min(chunk.start + chunk.num_tokens, request.num_tokens - 1)
        scored = _Scored(chunk_index, len(self.rows), request.tokens(begin + 1, end + 1) if begin < end else [])
        offset = self._token_starts[chunk_index] - chunk.start
        self.rows.extend(range(begin + offset, begin + offset + len(scored.targets)))
        return scored

    def results(self, logits: Tensor, hidden: Tensor, sample: Sample) -> list[Sampled | None]:
        """What each chunk's request gets, None if it is not its last chunk. Requests change only when everything is computed.

        Args:
            logits: ``[len(rows), vocab]``.
            hidden: ``[T, hidden_size]``, of all the step's tokens.
        """
        results: list[Sampled | None] = [None] * len(self._chunks)
        generating = [self._chunks[i].request for i in self._generating]
        for i, sampled in zip(self._generating, sample(logits[: len(generating)], generating), strict=True):
            results[i] = sampled
        scores = [_log_likelihood(logits[row : row + len(targets)], targets) for _, row, targets in self._scored]
        sums = [hidden[self._token_starts[i] : self._token_starts[i + 1]].float().sum(0) for i in self._embedded]
        for scored, score in zip(self._scored, scores, strict=True):
            results[scored.chunk_index] = _add_score(self._chunks[scored.chunk_index], score)
        for i, total in zip(self._embedded, sums, strict=True):
            results[i] = _add_to_pool(self._chunks[i], total)
        return results


def sample_chosen(token_ids: Sequence[int]) -> Sample:
    """A `Sample` of what was chosen without logits: one token per row, negative if there is none."""
    return lambda _logits, _requests: [FAILED if token < 0 else Sampled(token) for token in token_ids]


def _log_likelihood(logits: Tensor, targets: Sequence[int]) -> float:
    """Sum of the log-probabilities of ``targets`` under logits ``[n, vocab]``."""
    total = 0.0
    for piece, wanted in zip(logits.split(_SCORED_ROWS), torch.tensor(targets, device=logits.device).split(_SCORED_ROWS), strict=True):
        rows = piece.float()
        picked = rows.gather(-1, wanted[:, None])[:, 0] - rows.logsumexp(-1)
        total += float(picked.double().sum())
    return total


def _add_score(chunk: ScheduledChunk, score: float) -> Sampled | None:
    request = chunk.request
    request.score += score
    if not chunk.last:
        return None
    return Sampled() if math.isfinite(request.score) else FAILED


def _add_to_pool(chunk: ScheduledChunk, total: Tensor) -> Sampled | None:
    """The mean over the tokens, scaled to length 1, when the last chunk is in."""
    request = chunk.request
    request.pooled = total if request.pooled is None else request.pooled + total
    if not chunk.last:
        return None
    embedding = torch.nn.functional.normalize(request.pooled / request.num_tokens, dim=0)
    return Sampled(embedding=embedding.tolist()) if bool(embedding.isfinite().all()) else FAILED
