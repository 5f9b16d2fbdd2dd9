"""The engine's outputs for one wire request: one, or several that share its reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from producer.wire import Chunk
from worker.engine.output_collector import OutputCollector, ending_of
from worker.engine.request import Request
from worker.engine.step import StepOutput
from worker.engine_api import Detokenizer
from worker.transcript import Transcript


@dataclass(slots=True, eq=False)
class Output:
    """What one engine request has produced so far.

    Attributes:
        last_token_s: monotonic; None before the first token of this attempt.
    """

    transcript: Transcript
    last_token_s: float | None = None


class Outputs:
    """The outputs of one wire request; used by one thread at a time.

    A single output is published as it grows, and a later attempt continues from what is published. Several outputs are only in
    the final reply, and a later attempt makes them again; their text is the same, because their seeds are.

    Attributes:
        num_resumed: output tokens that earlier attempts published.

    Args:
        requests: as `InputProcessor.prepare_all` makes them, in the order of the reply.
    """

    def __init__(self, request_id: str, requests: Sequence[Request], make_detokenizer: Callable[[Request], Detokenizer]) -> None:
        self.num_resumed = 0
        self.collector = OutputCollector(request_id, requests)
        self._outputs = {request: Output(_transcript(request, make_detokenizer)) for request in requests}

    @property
    def requests(self) -> list[Request]:
        return self.collector.requests

    @property
    def single(self) -> bool:
        return len(self._outputs) == 1

    @property
    def first(self) -> Transcript:
        """The first one's text and tokens: published if it is the only one, and an error's partial output."""
        return self.of(self.requests[0]).transcript

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(len(output.transcript.token_ids) for output in self._outputs.values())

    def of(self, request: Request) -> Output:
        return self._outputs[request]

    def resume(self, chunks: Sequence[Chunk]) -> None:
        """Start from what earlier attempts published."""
        if not self.single:
            return
        (request,), transcript = self.requests, self.first
        transcript.resume(chunks)
        self.num_resumed = len(transcript.token_ids)
        request.output_token_ids = list(transcript.token_ids)
        request.logprobs = list(transcript.logprobs or ())

    def push(self, step: StepOutput) -> bool:
        """Add a step's result for one of them.

        Returns whether that one has ended with success, including by a stop string, which the engine does not know about.
        """
        transcript = self.of(step.request).transcript
        stopped_by = transcript.push(step.token_ids, step.logprobs, finished=step.finished)
        ended = step.error_code is None and (step.finished or stopped_by is not None)
        if ended:
            index = self.collector.index(step.request)
            ending = ending_of(step, index, transcript.text, transcript.token_ids, transcript.logprobs, stopped_by)
            self.collector.put(step.request, ending)
        return ended


def _transcript(request: Request, make_detokenizer: Callable[[Request], Detokenizer]) -> Transcript:
    return Transcript(make_detokenizer(request), logprobs=request.params.logprobs is not None)
