"""The error tree: codes, retryability, and surviving a process border."""

from __future__ import annotations

import pickle

import pytest

import producer
from producer.errors import BY_CODE, HeadraceError, Poisoned, error_from_code

RETRYABLE = {
    *("QUEUE_FULL", "BATCH_FAILED", "OUT_OF_MEMORY", "MODEL_UNAVAILABLE", "INTERNAL", "WAIT_TIMEOUT", "REDIS_UNAVAILABLE"),
}


def test_codes_and_retryability_are_as_published() -> None:
    assert set(BY_CODE) == RETRYABLE | {
        *("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED", "DEADLINE_EXCEEDED", "CANCELLED", "POISONED", "REPLY_EXPIRED", "UNKNOWN_REQUEST"),
    }
    assert {code for code, cls in BY_CODE.items() if cls.retryable} == RETRYABLE


@pytest.mark.parametrize("cls", BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_every_error_is_public_and_survives_pickling(cls: type[HeadraceError]) -> None:
    assert getattr(producer, cls.__name__) is cls
    error = cls("why", request_id="x", field="f", partial_text="a", partial_token_ids=[1])
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is cls
    assert (str(again), again.__dict__) == (str(error), error.__dict__)


@pytest.mark.parametrize("code", BY_CODE)
def test_error_is_built_from_its_code(code: str) -> None:
    error = error_from_code(code, "why", retryable=not BY_CODE[code].retryable, field="f")
    assert (type(error), error.code, error.retryable, error.field) == (BY_CODE[code], code, BY_CODE[code].retryable, "f")


def test_unknown_code_keeps_what_the_wire_said_through_pickling() -> None:
    error = pickle.loads(pickle.dumps(error_from_code("NEW", "why", retryable=True)))  # noqa: S301 - our own
    assert (type(error), error.code, error.retryable) == (HeadraceError, "NEW", True)
    assert HeadraceError("x").code == "INTERNAL"


def test_python_callers_may_catch_the_builtin_kinds() -> None:
    assert issubclass(BY_CODE["WAIT_TIMEOUT"], TimeoutError)
    assert issubclass(BY_CODE["INVALID_REQUEST"], ValueError)
    assert issubclass(BY_CODE["UNKNOWN_REQUEST"], LookupError)
    assert issubclass(BY_CODE["REDIS_UNAVAILABLE"], ConnectionError)
    assert not issubclass(Poisoned, ValueError)
