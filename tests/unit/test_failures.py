"""When a device that has no memory left is told from requests that want too much of it."""

from __future__ import annotations

import pytest
import torch

from tests.scheduling import make_request
from worker.engine.failures import EXHAUSTED_AFTER, Exhaustion, FatalDeviceError
from worker.engine.step import ScheduledChunk, StepPlan

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
MANY, LONG = 300, 4000


def plan(num_tokens: int, context: int) -> StepPlan:
    return StepPlan([ScheduledChunk(make_request(context), context - num_tokens, num_tokens, last=True)])


@pytest.fixture
def exhaustion() -> Exhaustion:
    """Of a device that has had memory for many tokens of a short context, and for one token of a long one."""
    exhaustion = Exhaustion()
    for done in (plan(MANY, MANY), plan(1, LONG), plan(1, LONG // 2)):
        exhaustion.succeeded(done)
    return exhaustion


@pytest.mark.parametrize(("num_tokens", "context"), [(MANY, LONG), (MANY + 1, MANY + 1), (1, LONG + 1), (200, LONG)])
def test_what_is_larger_than_each_step_that_succeeded_does_not_speak_against_the_device(
    exhaustion: Exhaustion, num_tokens: int, context: int
) -> None:
    for _ in range(3 * EXHAUSTED_AFTER):
        exhaustion.hit(plan(num_tokens, context), OUT_OF_MEMORY)


@pytest.mark.parametrize(("num_tokens", "context"), [(MANY, MANY), (1, LONG), (MANY - 50, MANY - 20), (1, LONG - 1)])
def test_what_lies_within_a_step_that_succeeded_does(exhaustion: Exhaustion, num_tokens: int, context: int) -> None:
    for _ in range(EXHAUSTED_AFTER - 1):
        exhaustion.hit(plan(num_tokens, context), OUT_OF_MEMORY)
    with pytest.raises(FatalDeviceError, match="8 requests in a row"):
        exhaustion.hit(plan(num_tokens, context), OUT_OF_MEMORY)


def test_a_success_or_another_fault_ends_the_row(exhaustion: Exhaustion) -> None:
    for _ in range(EXHAUSTED_AFTER - 1):
        exhaustion.hit(plan(1, 1), OUT_OF_MEMORY)
    exhaustion.succeeded(plan(1, 1))
    for _ in range(EXHAUSTED_AFTER - 1):
        exhaustion.hit(plan(1, 1), OUT_OF_MEMORY)
    exhaustion.hit(plan(1, 1), ValueError())
    for _ in range(EXHAUSTED_AFTER - 1):
        exhaustion.hit(plan(1, 1), OUT_OF_MEMORY)
