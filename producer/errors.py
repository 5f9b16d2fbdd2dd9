"""The errors a caller can meet, and their stable wire codes.

Every error has a ``code`` that never changes, and ``retryable`` says whether sending the
same request again can help. Messages name the field, the value's type and the limit, never the
user's text.
"""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose.

    Attributes:
        code: stable identifier, the same on the wire, in logs and in metrics.
        retryable: whether the same request may succeed when it is sent again.
        request_id: the request it concerns, if there is one.
        field: the offending field of the request, if there is one.
        partial_text: what had been generated before the error, if anything.
        partial_token_ids: the token ids of ``partial_text``.
    """

    code: str = "INTERNAL"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        field: str | None = None,
        partial_text: str = "",
        partial_token_ids: list[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.field = field
        self.partial_text = partial_text
        self.partial_token_ids = partial_token_ids or []

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[HeadraceError], message: str, state: dict[str, Any]) -> HeadraceError:
    error = cls(message)
    error.__dict__.update(state)
    return error


class InvalidRequest(HeadraceError, ValueError):
    """The request is malformed; ``field`` names the culprit."""

    code = "INVALID_REQUEST"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus output cannot fit the model's context or the worker's whole KV cache."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class QueueFull(HeadraceError):
    """The tier's depth limit is reached; nothing was enqueued."""

    code = "QUEUE_FULL"
    retryable = True


class DeadlineExceeded(HeadraceError):
    """The request's absolute deadline passed before it finished."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(HeadraceError):
    """The request was cancelled by its caller or an operator."""

    code = "CANCELLED"


class BatchFailed(HeadraceError):
    """The model step that held this request raised."""

    code = "BATCH_FAILED"
    retryable = True


class OutOfMemory(HeadraceError):
    """The device ran out of memory on this request."""

    code = "OUT_OF_MEMORY"
    retryable = True


class Poisoned(HeadraceError):
    """Given up: the workers that held this request died too often."""

    code = "POISONED"


class ModelUnavailable(HeadraceError):
    """No worker serves the model, or it could not be loaded."""

    code = "MODEL_UNAVAILABLE"
    retryable = True


class InternalError(HeadraceError):
    """A fault of Headrace's own."""

    code = "INTERNAL"
    retryable = True


class WaitTimeout(HeadraceError, TimeoutError):
    """The caller's own timeout passed; raised by the client, never sent on the wire."""

    code = "WAIT_TIMEOUT"
    retryable = True


class ReplyExpired(HeadraceError):
    """The request had its final reply, but the reply's lifetime is over."""

    code = "REPLY_EXPIRED"


class UnknownRequest(HeadraceError, LookupError):
    """No request of that id is known."""

    code = "UNKNOWN_REQUEST"


class RedisUnavailable(HeadraceError, ConnectionError):
    """Redis could not be reached, or refused to serve, for longer than the caller waits."""

    code = "REDIS_UNAVAILABLE"
    retryable = True


BY_CODE: dict[str, type[HeadraceError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        QueueFull,
        DeadlineExceeded,
        Cancelled,
        BatchFailed,
        OutOfMemory,
        Poisoned,
        ModelUnavailable,
        InternalError,
        WaitTimeout,
        ReplyExpired,
        UnknownRequest,
        RedisUnavailable,
    )
}

CLIENTS_OWN = frozenset((QueueFull, WaitTimeout, ReplyExpired, UnknownRequest, RedisUnavailable))  # no worker ever answers with these


def error_from_code(code: str, message: str, *, retryable: bool = False, **details: Any) -> HeadraceError:
    """Build the typed error for a wire code; an unknown code becomes `HeadraceError` itself, with that code and ``retryable``."""
    error = BY_CODE.get(code, HeadraceError)(message, **details)
    if error.code != code:
        error.code, error.retryable = code, retryable
    return error
