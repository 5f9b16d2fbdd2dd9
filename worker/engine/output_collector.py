"""One reply from the engine requests that a wire request became (`InputProcessor.prepare_all`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producer.wire import Choice, Result, TokenLogprob, Usage
from worker.engine.request import Request
from worker.engine.step import StepOutput

Ending = Choice | float | list[float]  # of kind generate, score, embed


class OutputCollector:
    """Collects the endings of one wire request's engine requests until all have ended.

    Args:
        request_id: of the wire request.
        requests: as `InputProcessor.prepare_all` returned them.
    """

    def __init__(self, request_id: str, requests: Sequence[Request]) -> None:
        self.request_id = request_id
        self.requests = list(requests)
        self._endings: dict[str, Ending] = {}

    @property
    def complete(self) -> bool:
        """Whether all have ended."""
        return len(self._endings) == len(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt that all of them share."""
        first = self.requests[0]
        return first.score_start if first.kind == "score" else first.num_prompt_tokens

    def has(self, request: Request) -> bool:
        """Whether one has ended."""
        return request.id in self._endings

    def put(self, request: Request, ending: Ending) -> None:
        """Record how one ended: its `Choice`, its score, or its embedding."""
        assert request in self.requests, f"{request.id} is no part of {self.request_id}"
        self._endings[request.id] = ending

    def index(self, request: Request) -> int:
        """The place of a request's output in the reply."""
        return self.requests.index(request)

    def result(self, **fields: Any) -> Result:
        """The reply. ``fields``: what the engine does not know (timings, attempt, worker, model)."""
        assert self.complete, "some have not ended"
        endings = [self._endings[request.id] for request in self.requests]
        return Result(id=self.request_id, usage=self._usage(), **_output_fields(endings), **fields)

    def _usage(self) -> Usage:
        """The prompt counts once; a continuation counts as completion."""
        first = self.requests[0]
        if first.kind == "score":
            completion = sum(request.num_prompt_tokens - request.score_start for request in self.requests)
        else:
            completion = sum(len(ending.token_ids) for ending in self._endings.values() if isinstance(ending, Choice))
        return Usage(self.num_prompt_tokens, completion, first.num_cached_tokens)


def ending_of(
    step: StepOutput, index: int, text: str, token_ids: list[int], logprobs: list[TokenLogprob] | None, stopped_by: str | None
) -> Ending:
    """The ending of the output at ``index`` of the reply; ``step`` is its last one.

    Args:
        text: of all its ``token_ids``.
        stopped_by: the stop string that ended it, which the engine does not know about.
    """
    if step.score is not None:
        return step.score
    if step.embedding is not None:
        return step.embedding
    if stopped_by is not None:
        return Choice(index, text, token_ids, "stop", stopped_by, logprobs)
    assert step.finish_reason is not None, "it goes on, or has failed"
    return Choice(index, text, token_ids, step.finish_reason, step.stop_reason, logprobs)


def _output_fields(endings: Sequence[Ending]) -> dict[str, Any]:
    choices = [ending for ending in endings if isinstance(ending, Choice)]
    if choices:
        first = choices[0]
        names = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs")
        return {name: getattr(first, name) for name in names} | {"choices": choices if len(choices) > 1 else None}
    if isinstance(endings[0], list):
        return {"embedding": endings[0]}
    return {"scores": list(endings)}
