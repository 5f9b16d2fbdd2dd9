"""One request's output as the worker sees it: tokens, text, and how much of both has been published."""

from __future__ import annotations

from collections.abc import Sequence

from producer.wire import Chunk, TokenLogprob
from worker.engine_api import Detokenizer


class Transcript:
    """Output tokens and their text; used by one thread at a time.

    Text is published in pieces that end where a frame's tokens end. Those places are remembered, because Redis may report at
    any time that fewer tokens are published than we know (it lost its last writes) or more (our call's reply was lost).
    Publishing then continues from there, with no gap and no repeat.

    Attributes:
        token_ids: all output tokens, those of earlier attempts first.
        logprobs: one per token, or None if they are not wanted.
        text: what has been detokenised; it may lag behind the tokens.
    """

    def __init__(self, detokenizer: Detokenizer, *, logprobs: bool) -> None:
        self._detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self.text = ""
        self._ends = {0: 0}  # characters of text by tokens, at the end of each frame
        self._published = 0

    @property
    def num_unpublished(self) -> int:
        return len(self.token_ids) - self._published

    def resume(self, chunks: Sequence[Chunk]) -> None:
        """Start from what earlier attempts published."""
        assert not self.token_ids, "resumed once, at the start"
        characters = 0
        for chunk in chunks:
            if self.logprobs is not None and chunk.logprobs is None:
                break
            self._extend(chunk.token_ids, chunk.logprobs)
            characters += len(chunk.text)
            self._ends[len(self.token_ids)] = characters
        self._published = len(self.token_ids)
        if self.token_ids:
            self.text = self._detokenizer.push(self.token_ids, finished=False).text

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, *, finished: bool) -> str | None:
        """Add a step's tokens. Returns the stop string if they complete one; tokens after it are then dropped."""
        delta = self._detokenizer.push(token_ids, finished=finished)
        kept = delta.num_tokens_kept
        self._extend(token_ids[:kept], logprobs[:kept] if logprobs is not None else None)
        self.text += delta.text
        return delta.stopped_by

    def unpublished(self) -> Chunk:
        """The tokens not yet published, and the text that goes with them."""
        first, characters = self._published, self._characters(self._published)
        self._ends[len(self.token_ids)] = len(self.text)
        logprobs = self.logprobs[first:] if self.logprobs is not None else None
        return Chunk(text=self.text[characters:], token_ids=self.token_ids[first:], index=first, logprobs=logprobs)

    def stands_published(self, num_tokens: int) -> None:
        """Redis says how many tokens are published: continue from there.

        If no frame of ours or of an earlier attempt ended there, what is published is not ours, and nothing more is published.
        """
        self._published = num_tokens if num_tokens in self._ends else len(self.token_ids)

    def _extend(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.token_ids += token_ids
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs

    def _characters(self, num_tokens: int) -> int:
        """Characters of text published with the first ``num_tokens`` tokens, at the end of some frame."""
        return self._ends[num_tokens]
