"""Headrace's light client: puts a request on a queue and blocks on its answer.

Names are loaded when first used, so that ``producer.sampling`` or ``producer.wire`` can be
imported without redis, and importing the client never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from producer.aio import AsyncClient, AsyncHandle
    from producer.client import Client, Handle
    from producer.errors import (
        BatchFailed,
        Cancelled,
        ContextLengthExceeded,
        DeadlineExceeded,
        HeadraceError,
        InternalError,
        InvalidRequest,
        ModelUnavailable,
        OutOfMemory,
        Poisoned,
        QueueFull,
        RedisUnavailable,
        ReplyExpired,
        UnknownRequest,
        WaitTimeout,
    )
    from producer.sampling import SamplingParams
    from producer.wire import Choice, Chunk, Result, Timings, TokenLogprob, Usage

__version__ = "0.1.0"

_MODULE_OF = {
    "AsyncClient": "aio",
    "AsyncHandle": "aio",
    "Client": "client",
    "Handle": "client",
    "SamplingParams": "sampling",
    **dict.fromkeys(("Choice", "Chunk", "Result", "Timings", "TokenLogprob", "Usage"), "wire"),
    **dict.fromkeys(
        (
            "BatchFailed",
            "Cancelled",
            "ContextLengthExceeded",
            "DeadlineExceeded",
            "HeadraceError",
            "InternalError",
            "InvalidRequest",
            "ModelUnavailable",
            "OutOfMemory",
            "Poisoned",
            "QueueFull",
            "RedisUnavailable",
            "ReplyExpired",
            "UnknownRequest",
            "WaitTimeout",
        ),
        "errors",
    ),
}

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "BatchFailed",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Handle",
    "HeadraceError",
    "InternalError",
    "InvalidRequest",
    "ModelUnavailable",
    "OutOfMemory",
    "Poisoned",
    "QueueFull",
    "RedisUnavailable",
    "ReplyExpired",
    "Result",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "UnknownRequest",
    "Usage",
    "WaitTimeout",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
