"""Greedy generation by transformers and by the engine's scheduler and runner, and the comparison of the two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from producer.keys import Tier
from producer.sampling import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.model_loader import LoadedModel
from worker.engine.model_runner import ModelRunner
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.step import ScheduledChunk, StepPlan

NEAR_TIE = 1e-4  # gap between the two greatest logits, in float32, below which rounding may decide


@dataclass(frozen=True)
class Expected:
    """The result of transformers' ``generate`` for a prompt: tokens, and by how much each was the likeliest."""

    token_ids: list[int]
    gaps: list[float]

    def agreement(self, token_ids: Sequence[int]) -> int:
        """How many tokens agree. A difference is allowed only at a near tie, and ends the comparison: everything after it differs."""
        for i, (token, expected, gap) in enumerate(zip(token_ids, self.token_ids, self.gaps, strict=True)):
            if token != expected:
                assert gap < NEAR_TIE, f"token {i} is {token}, not {expected}, which was ahead by {gap:.3g}"
                return i
        return len(token_ids)


def generate(model: Any, prompt: Sequence[int], max_tokens: int) -> Expected:
    """transformers' own greedy output, the prompt alone. The model's attention must be its own."""
    token_ids = torch.tensor([prompt])
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.cat(output.logits).topk(2).values
    return Expected(output.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


def greedy_request(index: int, prompt: Sequence[int], max_tokens: int, tier: Tier = "realtime") -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(f"r{index}", list(prompt), params, max_tokens, tier=tier, arrival=index)


class Loop:
    """The core of the engine: a runner, a scheduler, and one step after the other.

    With ``rng``, requests arrive at random steps, and chunks are cut at random.
    """

    def __init__(self, loaded: LoadedModel, rng: random.Random | None = None, **settings: Any) -> None:
        self.config = EngineConfig(**settings).for_device(loaded.device.type)
        self.runner = ModelRunner(loaded, self.config)
        self._rng = rng
        self._max_model_len = loaded.max_model_len
        self.scheduler = Scheduler(self.config, self.runner.num_blocks, self.runner.num_cpu_blocks, loaded.max_model_len)

    def run(self, requests: Sequence[Request]) -> None:
        """Run requests to their ends."""
        waiting = list(requests)
        while waiting or self.scheduler.has_work():
            while waiting and (self._rng is None or self._rng.random() < 0.4):
                self.scheduler.add(waiting.pop(0))
            if self.scheduler.has_work():
                self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.runner.copy_blocks(plan)
        if self._rng is not None:
            plan = StepPlan([_cut(chunk, self._rng) for chunk in plan.chunks])
        results = self.runner.run(plan)
        self.scheduler.advance(plan)
        for chunk, sampled in zip(plan.chunks, results, strict=True):
            if sampled is not None:
                request = chunk.request
                assert sampled.error_code is None
                request.output_token_ids.append(sampled.token_id)
                if len(request.output_token_ids) == request.max_tokens:
                    self.scheduler.finish(request)


def _cut(chunk: ScheduledChunk, rng: random.Random) -> ScheduledChunk:
    """The chunk or, as often as not, a first part of it."""
    if chunk.num_tokens == 1 or rng.random() < 0.5:
        return chunk
    return chunk._replace(num_tokens=rng.randrange(1, chunk.num_tokens), last=False)
