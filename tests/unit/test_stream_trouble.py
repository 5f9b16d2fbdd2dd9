from __future__ import annotations

import pytest
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError

from worker.stream.trouble import Trouble, worker_outage


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_pauses_grow_to_a_cap_and_start_small_after_a_success(clock: Clock) -> None:
    trouble = Trouble(worker_outage(clock), clock)
    pauses = [trouble.hit(RedisConnectionError()) for _ in range(20)]
    assert pauses[0] <= 0.05
    assert all(pause <= 2.0 for pause in pauses)
    assert min(pauses[10:]) >= 1.0
    trouble.clear()
    assert trouble.hit(RedisConnectionError()) <= 0.05


def test_jitter_spreads_the_pauses(clock: Clock) -> None:
    first = {Trouble(worker_outage(clock), clock).hit(RedisConnectionError()) for _ in range(20)}
    assert len(first) > 10


def test_not_ready_until_the_pause_is_over(clock: Clock) -> None:
    trouble = Trouble(worker_outage(clock), clock)
    assert trouble.ready
    pause_s = trouble.hit(RedisConnectionError())
    assert not trouble.ready
    clock.now_s += pause_s
    assert trouble.ready


def test_several_threads_in_trouble_are_one_outage_in_the_log(clock: Clock) -> None:
    outage = worker_outage(clock)
    one, two = Trouble(outage, clock), Trouble(outage, clock)
    with structlog.testing.capture_logs() as log:
        one.clear()
        one.hit(RedisConnectionError("refused"))
        clock.now_s += 1.0
        two.hit(RedisConnectionError("refused"))
        one.hit(RedisConnectionError("refused"))
        one.clear()
        clock.now_s += 2.0
        two.clear()
        two.clear()
    assert [(line["event"], line["log_level"]) for line in log] == [("redis trouble", "warning"), ("redis trouble over", "info")]
    assert log[1]["seconds"] == 3.0
