"""What is told of a request when it ends: its result, its sample in the metrics, its line in the log."""

from __future__ import annotations

import json
import time

import structlog

from producer.codec import decode_request
from producer.errors import HeadraceError, InvalidRequest
from producer.wire import Result, Timings
from worker.metrics import RequestStats
from worker.registry import ActiveRequest
from worker.stream.delivery import Settlement, TokensFrame

MAX_LOGGED_CHARACTERS = 2000  # of a prompt, and of an output

log = structlog.get_logger("headrace.worker")


def result_of(active: ActiveRequest, *, worker: str, model: str) -> Result:
    """The result of a request all of whose outputs have ended."""
    outputs, start = active.outputs, active.start
    assert outputs is not None, "it ran"
    assert start is not None, "it ran"
    now_ms = start.since_enqueued_ms(time.monotonic())  # one that had all its tokens when it was resumed got none here
    return outputs.collector.result(
        timings=Timings(
            queue_ms=active.queue_ms or 0.0,
            ttft_ms=now_ms if active.ttft_ms is None else active.ttft_ms,
            total_ms=now_ms if active.last_token_s is None else start.since_enqueued_ms(active.last_token_s),
        ),
        attempt=active.delivery.attempt,
        worker=worker,
        model=model,
    )


def frame_of(active: ActiveRequest) -> TokensFrame:
    """The tokens that are not published yet."""
    assert active.transcript is not None, "it has tokens"
    return active.delivery.tokens_frame(active.transcript.unpublished())


def settlement_of(active: ActiveRequest) -> Settlement:
    """How a request that has its outcome is to end."""
    outcome, outputs = active.outcome, active.outputs
    assert outcome is not None, "it has ended"
    if isinstance(outcome, HeadraceError):
        return active.delivery.failure(outcome)
    assert outputs is not None, "it ran"
    tail = frame_of(active) if active.streamed and outputs.single and outputs.first.num_unpublished else None
    return active.delivery.success(outcome, tail)


def without_what_is_too_large(active: ActiveRequest) -> HeadraceError:
    """Replaces an outcome too large for a reply: the same error without partial output, or one that names what was asked for."""
    outcome = active.outcome
    if isinstance(outcome, HeadraceError):
        outcome.partial_text, outcome.partial_token_ids = "", []
        return outcome
    assert active.outputs is not None, "it ran"
    params = active.outputs.requests[0].params
    field = "logprobs" if params.logprobs is not None else "max_tokens" if active.outputs.single else "n"
    return InvalidRequest(f"{field} asks for more than one reply can hold", field=field, request_id=active.id)


def stats_of(active: ActiveRequest) -> RequestStats:
    """The single phases are reported only for a request that ran in one piece: of a resumed one this worker knows only the last part."""
    outcome, start = active.outcome, active.start
    failed = isinstance(outcome, HeadraceError)
    step_s, first_s, last_s = active.first_step_s, active.first_token_s, active.last_token_s
    whole = start is not None and not active.resumed
    return RequestStats(
        tier=active.tier,
        source=active.source,
        finish_reason=outcome.finish_reason if isinstance(outcome, Result) else None,
        error_code=outcome.code if isinstance(outcome, HeadraceError) else None,
        generation_tokens=active.outputs.num_tokens if active.outputs is not None else 0,
        e2e_seconds=start.since_enqueued_ms(last_s) / 1000 if start is not None and last_s is not None and not failed else None,
        queue_seconds=active.queue_ms / 1000 if active.queue_ms is not None and whole else None,
        prefill_seconds=first_s - step_s if first_s is not None and step_s is not None and whole else None,
        decode_seconds=last_s - first_s if last_s is not None and first_s is not None and whole else None,
    )


def log_end(active: ActiveRequest, became: str, *, with_text: bool) -> None:
    """One line per request, without the user's text unless ``with_text``."""
    log.info("request ended", became=became, **_figures(active), **(_texts(active) if with_text else {}))


def _figures(active: ActiveRequest) -> dict[str, object]:
    outcome, start, delivery = active.outcome, active.start, active.delivery
    fields: dict[str, object] = {"id": active.id, "tier": active.tier, "source": active.source, "attempt": delivery.attempt}
    if active.outputs is not None:
        fields |= {"prompt_tokens": active.outputs.collector.num_prompt_tokens, "completion_tokens": active.outputs.num_tokens}
    if start is not None:
        fields["total_ms"] = start.since_enqueued_ms(time.monotonic())
        fields |= {name: ms for name, ms in (("queue_ms", active.queue_ms), ("ttft_ms", active.ttft_ms)) if ms is not None}
    if isinstance(outcome, HeadraceError):
        fields["code"] = outcome.code
    elif outcome is not None:
        fields["finish_reason"] = outcome.finish_reason
    return fields


def _texts(active: ActiveRequest) -> dict[str, object]:
    """Prompt and output, each cut to `MAX_LOGGED_CHARACTERS`, with their whole lengths; a prompt that cannot be read is ''."""
    prompt, output = _prompt(active), _output(active)
    return {
        "prompt": prompt[:MAX_LOGGED_CHARACTERS],
        "prompt_characters": len(prompt),
        "output": output[:MAX_LOGGED_CHARACTERS],
        "output_characters": len(output),
    }


def _prompt(active: ActiveRequest) -> str:
    """A prompt that is not one text is JSON: messages, token ids, or a prompt with the continuations to be scored."""
    try:
        wire_request = decode_request(active.delivery.fields, active.delivery.tier)
    except InvalidRequest:
        return ""
    prompt: object = wire_request.prompt if wire_request.prompt is not None else wire_request.messages or wire_request.prompt_token_ids
    if wire_request.continuations is not None:
        prompt = {"prompt": prompt, "continuations": wire_request.continuations}
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _output(active: ActiveRequest) -> str:
    """Several outputs are a JSON list; for a failed request it is what had been generated."""
    outcome = active.outcome
    if isinstance(outcome, HeadraceError):
        return outcome.partial_text
    if outcome is None:
        return active.transcript.text if active.transcript is not None else ""
    return json.dumps([choice.text for choice in outcome.choices], ensure_ascii=False) if outcome.choices is not None else outcome.text
