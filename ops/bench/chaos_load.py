"""Callers for `ops.bench.chaos`: they wait, read along, cancel or go away, and record what they got."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from producer import Client, HeadraceError, Result

Manner = Literal["wait", "stream", "cancel", "abandon"]
MANNERS: tuple[Manner, ...] = ("wait", "stream", "cancel", "abandon")
WEIGHTS = (50, 35, 10, 5)
PROMPTS = ("The capital of France is", "Once upon a time there was a mill", "def fibonacci(n):", "Water boils at", "A headrace is")
MIN_TOKENS = 4
CALL_TIMEOUT_S = 900.0  # a request in whose attempts two workers died waits for its turn to run alone
PATIENCE_S = 120.0  # until a request is accepted, while Redis comes and goes


@dataclass(slots=True)
class Call:
    """One request as its caller saw it.

    Attributes:
        outcome: ``ok`` or the code of the error; '' while it is in flight.
        faults: what about the answer was wrong.
    """

    id: str
    manner: Manner
    prompt: str
    max_tokens: int
    accepted: bool = False
    outcome: str = ""
    attempt: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


class Load:
    """``count`` callers, each with one request after the other on ``url``, until `stop`.

    Args:
        references: for each of `PROMPTS` the undisturbed greedy output of ``max_tokens`` tokens.
    """

    def __init__(self, url: str, queue: str, references: Mapping[str, Result], *, count: int, max_tokens: int, seed: int) -> None:
        self.calls: list[Call] = []
        self._client = Client(url, queue=queue, patience_s=PATIENCE_S)
        self._references = references
        self._max_tokens = max_tokens
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._callers = [self._pool.submit(self._run, i, random.Random(f"{seed}:{i}")) for i in range(count)]

    def stop(self, timeout_s: float) -> bool:
        """Let the callers finish their present calls; False if some do not."""
        self._stopping.set()
        deadline_s = time.monotonic() + timeout_s
        ended = all(_await(caller, deadline_s - time.monotonic()) for caller in self._callers)
        self._pool.shutdown(wait=ended, cancel_futures=True)
        if ended:
            self._client.close()
        return ended

    def _run(self, number: int, chance: random.Random) -> None:
        turn = 0
        while not self._stopping.is_set():
            (manner,) = chance.choices(MANNERS, WEIGHTS)
            call = Call(f"c{number}-{turn}", manner, chance.choice(PROMPTS), chance.randint(MIN_TOKENS, self._max_tokens))
            self.calls.append(call)
            started_s = time.monotonic()
            try:
                self._make(call, chance)
            except HeadraceError as error:
                call.outcome = error.code
            call.seconds = time.monotonic() - started_s
            turn += 1

    def _make(self, call: Call, chance: random.Random) -> None:
        options: dict[str, Any] = {"id": call.id, "max_tokens": call.max_tokens, "temperature": 0.0, "ignore_eos": True}
        handle = self._client.submit(call.prompt, tier=chance.choice(("realtime", "batch")), stream=call.manner == "stream", **options)
        call.accepted = True
        text, token_ids = "", list[int]()
        if call.manner == "stream":
            for chunk in handle.stream(timeout=CALL_TIMEOUT_S):
                text += chunk.text
                token_ids += chunk.token_ids
        elif call.manner == "cancel":
            time.sleep(chance.uniform(0.0, 0.3))
            handle.cancel()
        elif call.manner == "abandon":
            handle.cancel()
            return
        result = handle.result(timeout=CALL_TIMEOUT_S)
        call.outcome, call.attempt = "ok", result.attempt
        call.faults = tuple(self._faults(call, result, text, token_ids))

    def _faults(self, call: Call, result: Result, text: str, token_ids: list[int]) -> list[str]:
        reference = self._references[call.prompt]
        faults = []
        if result.token_ids != reference.token_ids[: call.max_tokens]:
            faults.append("tokens differ from an undisturbed run")
        if not reference.text.startswith(result.text.rstrip("\ufffd")):
            faults.append("text differs from an undisturbed run")
        if call.manner == "stream" and (text, token_ids) != (result.text, result.token_ids):
            faults.append("what was streamed is not the final answer")
        return faults


def references(url: str, queue: str, max_tokens: int) -> dict[str, Result]:
    """The undisturbed greedy output of each prompt."""
    with Client(url, queue=queue) as client:
        handles = [client.submit(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) for prompt in PROMPTS]
        return {prompt: handle.result(timeout=600) for prompt, handle in zip(PROMPTS, handles, strict=True)}


def _await(caller: Future[None], timeout_s: float) -> bool:
    try:
        caller.result(max(0.0, timeout_s))
    except TimeoutError:
        return False
    return True
