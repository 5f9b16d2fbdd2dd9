"""Triton's attention kernels compiled for real cards, without one: see test_attention_triton.py.

The interpreter takes programs that the compiler refuses, so both are asked. A driver that only names a card stands in for the
card; launches end after the compilation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.paged_attention import Case, make_step
from tests.tiny_models import tiny_model
from worker.engine.attention import triton_backend
from worker.engine.attention.layers import discover_layers
from worker.engine.fused import cuda_decoder
from worker.engine.model_loader import prepare_model

CASES = {
    "decodes": Case(query_lens=(1, 1), seq_lens=(2000, 100), num_heads=9, num_kv_heads=3),
    "mixed": Case(query_lens=(1, 100), seq_lens=(2000, 100), num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128),
    "everything": Case(
        query_lens=(1, 40), seq_lens=(2000, 4000), num_heads=10, head_dim=80, value_dim=72, window=1300, softcap=2.0, sinks=True
    ),
    "wide": Case(query_lens=(1, 40), seq_lens=(500, 500), head_dim=256, value_dim=256),
}


class NamedCard:
    """A driver of a card that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_only(capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on launches compile for one card instead of running; returns what they compile."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compiling(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(run(self, *args, **{**options, "warmup": True}))

    monkeypatch.setattr(JITFunction, "run", compiling)
    monkeypatch.setattr(triton_backend, "_num_multiprocessors", lambda _: 108)
    driver.set_active(NamedCard(capability))
    return kernels


@pytest.fixture(params=[80, 90], ids=["Ampere", "Hopper"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return compile_only(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_fit_a_small_card(name: str, dtype: torch.dtype, compiled: list[Any]) -> None:
    step = make_step(CASES[name], dtype)
    triton_backend.attend(*step.arguments, **step.options)
    assert [kernel.name for kernel in compiled] == ["write_kv_kernel", "paged_attention_kernel", "reduce_splits_kernel"]
    assert all(kernel.asm["cubin"] for kernel in compiled)
    assert all(kernel.metadata.shared <= 99 * 1024 for kernel in compiled)


@pytest.mark.parametrize("name", ["mixed", "wide"])
def test_kernels_fit_the_shared_memory_of_turing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_only(75, monkeypatch)
    monkeypatch.setattr(triton_backend, "_shared_bytes", lambda _: 61 * 1024)
    step = make_step(CASES[name], torch.float16)
    triton_backend.attend(*step.arguments, **step.options)
    assert len(kernels) == 3
    assert all(kernel.metadata.shared <= 64 * 1024 for kernel in kernels)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_the_kernels_of_the_fused_decoder_compile(architecture: str, compiled: list[Any]) -> None:
    loaded = prepare_model(tiny_model(architecture).bfloat16(), None, architecture)
    caches = [(torch.zeros(8, 2, 16, 16, dtype=torch.bfloat16), torch.zeros(8, 2, 16, 16, dtype=torch.bfloat16))] * 4
    layers = list(discover_layers(loaded.model, 64).values())
    decoder = cuda_decoder.fuse(loaded.model, loaded.config, layers, 64)
    assert decoder is not None
    decoder.bind(caches)
    meta = make_step(Case(query_lens=(1, 5), seq_lens=(9, 5))).meta
    with torch.inference_mode():
        decoder(torch.zeros(6, dtype=torch.int64), meta.positions, meta, torch.arange(2))
    names = {"add_norm_kernel", "rotate_and_write_kernel", "paged_attention_kernel", "gated_activation_kernel"}
    assert {kernel.name for kernel in compiled} == names


def test_batch_sizes_and_lengths_share_one_kernel(compiled: list[Any]) -> None:
    for query_lens, seq_lens in (((1,), (1000,)), ((1,) * 3, (16, 300, 900)), ((1,) * 16, (512,) * 16), ((1,) * 17, (513,) * 17)):
        step = make_step(Case(query_lens=query_lens, seq_lens=seq_lens), torch.bfloat16)
        triton_backend.attend(*step.arguments, **step.options)
    assert len({id(kernel) for kernel in compiled}) == 3
