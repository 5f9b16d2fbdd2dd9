"""What an exception from a step means."""

from __future__ import annotations

import traceback
from typing import NamedTuple

import structlog
import torch

from producer.errors import BatchFailed, HeadraceError, InternalError, OutOfMemory
from worker.engine.config import PROBE_TOKENS
from worker.engine.step import StepPlan

EXHAUSTED_AFTER = 8

log = structlog.get_logger("headrace.engine")


class FatalDeviceError(InternalError):
    """The device is lost for this process (CUDA errors are sticky, memory may never come back); only a new process helps."""


class _Size(NamedTuple):
    """The quantities with which a step's memory grows."""

    num_tokens: int
    longest_context: int

    @classmethod
    def of(cls, plan: StepPlan) -> _Size:
        return cls(plan.num_tokens, plan.longest_context)

    def within(self, other: _Size) -> bool:
        return self.num_tokens <= other.num_tokens and self.longest_context <= other.longest_context


class Exhaustion:
    """Tells a device that has lost memory from requests that need too much of it.

    A request that runs out of memory alone in its step counts if there was memory for as much before, that is, if a step of as
    many tokens and of as long a context has succeeded. When `EXHAUSTED_AFTER` of these fail one after the other with no success
    between, the device has lost memory. Larger requests do not count: each may need too much, however many come.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._largest = [_Size(PROBE_TOKENS, PROBE_TOKENS)]  # that succeeded, none within another; the model computed this one at load

    def succeeded(self, plan: StepPlan) -> None:
        """A step succeeded."""
        self._num_in_a_row = 0
        size = _Size.of(plan)
        if not self._had_memory_for(size):
            self._largest = [other for other in self._largest if not other.within(size)] + [size]

    def hit(self, plan: StepPlan, error: Exception) -> None:
        """A request failed alone in its step.

        Raises:
            FatalDeviceError: too many have run out of memory.
        """
        if not is_out_of_memory(error):
            self._num_in_a_row = 0
        elif self._had_memory_for(_Size.of(plan)):
            self._num_in_a_row += 1
        if self._num_in_a_row >= EXHAUSTED_AFTER:
            raise FatalDeviceError(f"out of memory: {self._num_in_a_row} requests in a row, each alone in its step") from error

    def _had_memory_for(self, size: _Size) -> bool:
        return any(size.within(other) for other in self._largest)


def is_fatal(error: Exception, device: torch.device) -> bool:
    """Whether the device is unusable. A device that still answers is not."""
    if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a device or on the host (torch reports the latter as a plain RuntimeError)."""
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "not enough memory" in str(error)
        or "can't allocate memory" in str(error)
    )


def release_memory(device: torch.device) -> None:
    """Return memory that torch keeps for later to the device, so that a smaller step may fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def as_request_error(error: Exception) -> HeadraceError:
    """The error for a request that is alone in a failing step. Messages of foreign exceptions stay in the log: they may hold anything."""
    if isinstance(error, HeadraceError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory("the device ran out of memory on this request")
    return BatchFailed(f"the model step failed on this request ({type(error).__name__})")


def log_culprit(request_id: str, error: Exception) -> None:
    """Log where a request made its step fail. As text, not as an exception: some renderers would show variables, including prompts."""
    log.error("request failed its step", id=request_id, traceback="".join(traceback.format_exception(error)))
