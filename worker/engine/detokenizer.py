"""One request's text as its tokens come: only whole characters, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from producer.sampling import SamplingParams
from worker.engine.text_decoder import vocabulary_of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added.

    Attributes:
        text: to be published now; all deltas joined are the request's text.
        stopped_by: the stop string that ended the output, if any; its tokens belong to the output, its text does not.
        num_tokens_kept: how many tokens of this push belong to the output; fewer than all only if a stop string
            was completed before the last of them.
    """

    text: str
    stopped_by: str | None
    num_tokens_kept: int


class Detokenizer:
    """Incremental detokenising of one request. The result depends only on the tokens, not on how they are pushed.

    Text that may still become a stop string is held back. A match counts if the token that completes it is at least
    number ``min_tokens``; among the matches that a token completes, the one that starts first wins, then the shorter.

    Args:
        tokenizer: a fast tokenizer of transformers.
        params: ``stop``, ``stop_token_ids`` and ``min_tokens`` matter here.
        output_token_ids: of a resumed request, what was generated (and its text published) before. Deltas continue from there.
        eos_token_ids: with ``stop_token_ids``, the tokens that are in the output but not in the text.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, output_token_ids: Sequence[int] = (), eos_token_ids: Collection[int] = ()
    ) -> None:
        self._decoder = vocabulary_of(tokenizer).new_decoder()
        self._stops = sorted(params.stop, key=len)
        self._lookback = max(map(len, params.stop), default=1) - 1
        self._min_tokens = params.min_tokens
        self._silent = frozenset((*params.stop_token_ids, *eos_token_ids))
        self._held = ""  # decoded, not published
        self._published: list[str] = []
        self.num_tokens = 0
        self.stopped_by: str | None = None
        self.push(output_token_ids, finished=False)

    @property
    def emitted_text(self) -> str:
        """All text published so far, including that of the resumed tokens."""
        return "".join(self._published)

    def push(self, token_ids: Sequence[int], finished: bool) -> TextDelta:
        """Take the next tokens. ``finished``: no more will come, so nothing is held back any longer."""
        ready = ""
        num_before = self.num_tokens
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            if token_id not in self._silent:
                ready += self._feed(self._decoder.push(token_id))
        if finished and self.stopped_by is None:
            ready += self._feed(self._decoder.flush())
            ready += self._held
            self._held = ""
        if ready:
            self._published.append(ready)
        return TextDelta(ready, self.stopped_by, self.num_tokens - num_before)

    def _feed(self, text: str) -> str:
        """Take decoded text; returns the part of the held text that may be published."""
        if not self._stops or not text:
            return text
        num_old = len(self._held)
        self._held += text
        if self.num_tokens >= self._min_tokens:
            stop, start = self._find_stop(num_old)
            if stop is not None:
                self.stopped_by = stop
                ready, self._held = self._held[:start], ""
                return ready
        keep = self._num_undecided()
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def _find_stop(self, num_old: int) -> tuple[str | None, int]:
        """The stop string found first, and where it starts; at least one of its characters is after the first ``num_old``."""
        best: str | None = None
        best_start = len(self._held)
        for stop in self._stops:
            start = self._held.find(stop, max(0, num_old - len(stop) + 1))
            if 0 <= start < best_start:
                best, best_start = stop, start
        return best, best_start

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        for length in range(min(self._lookback, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
