"""Which kernels serve: those that are asked for, or none; otherwise the fastest that do not fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from producer.errors import ModelUnavailable
from tests.tiny_engine import loaded_model, tiny_engine
from worker.engine.attention import torch_backend
from worker.engine.config import Attention, EngineConfig
from worker.engine.kernels import KernelChoice


@pytest.mark.parametrize("attention", sorted({*get_args(Attention)} - {"auto", "torch"}))
def test_attention_that_the_device_does_not_have_is_refused(attention: Attention) -> None:
    with pytest.raises(ModelUnavailable, match=f"^attention: {attention} "):
        tiny_engine(attention=attention)


def choice(monkeypatch: pytest.MonkeyPatch, attention: Attention) -> KernelChoice:
    """As on a CUDA device, for kernels that are never called."""

    def kernels(*_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: kernels)
    return KernelChoice(replace(loaded_model(), device=torch.device("cuda")), [], EngineConfig(attention=attention))


def test_kernels_that_fail_give_way_to_the_reference_and_that_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choice(monkeypatch, "auto")
    assert chosen.give_way(RuntimeError("no such kernel"))
    assert chosen.backend is torch_backend.attend
    assert not chosen.give_way(RuntimeError("no such kernel"))


def test_kernels_that_were_asked_for_give_way_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnavailable, match="attention: flashinfer fails: RuntimeError: no such kernel"):
        choice(monkeypatch, "flashinfer").give_way(RuntimeError("no such kernel"))
