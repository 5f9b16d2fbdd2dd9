"""How much batch work a step may hold beside realtime work. Pure bookkeeping: neither torch nor redis.

Every token in a step makes it longer, and with it the inter-token latency of all requests in it. Sarathi-Serve (Agrawal et al. 2024)
chooses a step's token budget by a goal for that latency, from a profile made beforehand. Here the profile is learnt while
running, and the goal bounds only the batch tier: tightly while there are realtime requests, and loosely otherwise, because
the next realtime request waits for the end of the current step.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable

from worker.engine.config import EngineConfig
from worker.engine.step import ScheduledChunk, StepPlan

LINGER_S = 1.0  # callers who wait for an answer ask again within this time: until then batch work is bounded as if they were there
MAX_SLOWDOWN = 1.25  # if realtime's decodes alone take longer than the goal, batch work may make their step longer by this factor
QUIET_GOALS = 4.0  # without realtime a step may take this many goals,
QUIET_BASES = 20.0  # or this many times the base cost of every step, if that is more: the bound costs at most a twentieth of throughput
QUIET_TOKENS = 2  # that a step without realtime may always hold: if all steps held one, the cost of more would not be learnt
MEMORY = 0.95  # weight of a step's figures relative to those of the next step
MAX_SURPRISE = 4.0  # a step counts for at most this many times the estimate: the host may have been frozen; lasting changes are soon learnt
STALE_STEPS = 1000  # after so many steps beside batch work, what realtime's decodes took alone says nothing of what they would take now
PRIOR = 0.25  # step sizes that vary by less than this share of their mean say little new about the cost of a token


class StepCost:
    """The duration of a step by its tokens: ``seconds = base + per_token * num_tokens``, least squares over recent steps.

    Attributes:
        base_s, s_per_token: neither is negative; both are 0 until something is known. Before sizes vary, all the time is attributed
            to the tokens; when they no longer vary, the learnt cost per token stays.
    """

    def __init__(self) -> None:
        self.base_s = self.s_per_token = 0.0
        self._fewest_tokens = sys.maxsize
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._product = 0.0

    @property
    def is_known(self) -> bool:
        return self._seconds > 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` tokens, at least one, took ``seconds``."""
        if self.is_known:
            seconds = min(seconds, MAX_SURPRISE * self.estimate_s(num_tokens))
        self._fewest_tokens = min(self._fewest_tokens, num_tokens)
        self._weight = MEMORY * self._weight + 1.0
        self._tokens = MEMORY * self._tokens + num_tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._tokens_squared = MEMORY * self._tokens_squared + num_tokens * num_tokens
        self._product = MEMORY * self._product + num_tokens * seconds
        self._fit(self._tokens / self._weight, self._seconds / self._weight)

    def estimate_s(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens takes."""
        return self.base_s + self.s_per_token * num_tokens

    def at_most_s(self, num_tokens: int) -> float:
        """As `estimate_s`, but a step smaller than any seen may take as long as the smallest seen: what it saves is not known."""
        return self.estimate_s(max(num_tokens, self._fewest_tokens))

    def _fit(self, tokens: float, seconds: float) -> None:
        variance = max(self._tokens_squared / self._weight - tokens * tokens, 0.0)
        covariance = self._product / self._weight - tokens * seconds
        prior = (PRIOR * tokens) ** 2
        before = self.s_per_token if self._weight > 1.0 else math.inf
        proportional = seconds / tokens
        s_per_token = (covariance + prior * min(before, proportional)) / (variance + prior)
        self.s_per_token = min(max(s_per_token, 0.0), proportional)
        self.base_s = seconds - self.s_per_token * tokens


class Pace:
    """Bounds the batch tier's tokens in a step by `EngineConfig.realtime_step_ms`, and lets its decodes take turns under the bound.

    With realtime requests there, the whole step should take no longer than the goal or, if that is more, `MAX_SLOWDOWN` times what
    realtime's decodes alone take. Their prefills have no such allowance: beside one that fills the step, batch work keeps its floor only.

    Args:
        keeps_floor: whether the batch tier has a floor, which is `EngineConfig.batch_floor` of what a bounded step holds.
        clock: monotonic seconds.
    """

    def __init__(self, config: EngineConfig, *, keeps_floor: bool, clock: Callable[[], float]) -> None:
        self.cost = StepCost()
        self._cost_alone = StepCost()  # of steps with only realtime decodes: a full batch makes every step longer
        self._steps_since_alone = 0
        self._goal_s = config.realtime_step_ms / 1000.0 if config.policy == "continuous" else 0.0
        self._max_batch_tokens = config.max_batch_tokens
        self._floor = config.batch_floor if keeps_floor else 0.0
        self._clock = clock
        self._realtime_seen_s = -math.inf
        self._last_turn = 0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took ``seconds``."""
        self.cost.observe(plan.num_tokens, seconds)
        self._steps_since_alone += 1
        if all(chunk.num_tokens == 1 and chunk.request.tier == "realtime" for chunk in plan.chunks):
            self._cost_alone.observe(plan.num_tokens, seconds)
            self._steps_since_alone = 0

    def begin_step(self, *, realtime_is_quiet: bool) -> bool:
        """Record whether realtime is there; returns whether the step's batch work is bounded, which needs a known cost of steps."""
        if not realtime_is_quiet:
            self._realtime_seen_s = self._clock()
        return bool(self._goal_s) and self.cost.is_known

    def batch_tokens(self, num_decodes: int, prefill_tokens: int = 0) -> int:
        """Tokens that the batch tier may compute in a step with so many realtime decodes and prefill tokens; at least 1."""
        return max(self._max_tokens(num_decodes) - num_decodes - prefill_tokens, self.floor_tokens(num_decodes))

    def floor_tokens(self, num_decodes: int) -> int:
        """How many of `batch_tokens` realtime's prefills must leave; at least 1, so that the bound alone starves no request."""
        return max(math.ceil(self._floor * self._max_tokens(num_decodes)), 1)

    def take_turns(self, decodes: list[ScheduledChunk], count: int) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """The decodes whose turn it is, at most ``count`` (> 0), and those that sit this step out: all get equally many turns."""
        if len(decodes) <= count:
            return decodes, []
        decodes = sorted(decodes, key=_number)
        first = bisect_right(decodes, self._last_turn, key=_number)
        decodes = decodes[first:] + decodes[:first]
        self._last_turn = _number(decodes[count - 1])
        return decodes[:count], decodes[count:]

    def _alone_s(self, num_decodes: int) -> float:
        """Seconds that so many realtime decodes would take alone.

        While there is batch work, steps with only these are not seen, and what was learnt from them gets outdated: it then only lowers
        the estimate from all steps, and after `STALE_STEPS` not even that.
        """
        everything_s = self.cost.estimate_s(num_decodes)
        if not self._cost_alone.is_known or self._steps_since_alone > STALE_STEPS:
            return everything_s
        return min(everything_s, self._cost_alone.at_most_s(num_decodes))

    def _max_tokens(self, num_decodes: int) -> int:
        """Most tokens of a step with so many realtime decodes; at least 1, and without realtime `QUIET_TOKENS`."""
        base_s, s_per_token = self.cost.base_s, self.cost.s_per_token
        if self._clock() - self._realtime_seen_s < LINGER_S:
            most_s, least = max(self._goal_s, MAX_SLOWDOWN * self._alone_s(num_decodes)), 1
        else:
            most_s, least = max(QUIET_GOALS * self._goal_s, QUIET_BASES * base_s), QUIET_TOKENS
        left_s = most_s - base_s
        if left_s <= 0.0:
            return least
        if left_s >= s_per_token * self._max_batch_tokens:
            return self._max_batch_tokens
        return max(int(left_s / s_per_token), least)


def _number(chunk: ScheduledChunk) -> int:
    """The order in which requests were added."""
    return chunk.request.sort_key[2]
