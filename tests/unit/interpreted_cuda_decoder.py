"""The fused decoder for CUDA against the model's own modules, run by Triton's interpreter: see test_attention_triton.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.paged_attention import Case, make_step, relative_error
from tests.tiny_models import VOCAB_SIZE, tiny_model
from worker.engine import quantization
from worker.engine.config import EngineConfig
from worker.engine.fused import cuda_decoder
from worker.engine.fused.structure import recognise
from worker.engine.model_loader import prepare_model
from worker.engine.model_runner import ModelRunner
from worker.engine.quantization import dequantize, quantize_linears

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3")
STEPS = (Case(query_lens=(5, 17), seq_lens=(5, 17)), Case(query_lens=(1, 4), seq_lens=(6, 21)), Case(query_lens=(1, 1), seq_lens=(7, 22)))


def make_decoder(
    architecture: str, *, int8: bool = False, **changes: Any
) -> tuple[ModelRunner, cuda_decoder.CudaDecoder, list[tuple[Tensor, Tensor]]]:
    """A runner with the reference attention, and the fused decoder of the same model over caches of its own."""
    model = tiny_model(architecture, **changes)
    if int8:
        quantize_linears(model)
    loaded = prepare_model(model, None, architecture)
    runner = ModelRunner(loaded, EngineConfig(num_blocks=8, max_batch_size=4, max_batch_tokens=64, attention="torch"))
    caches = [(k.clone(), v.clone()) for k, v in runner.cache.layers]
    decoder = cuda_decoder.fuse(loaded.model, loaded.config, runner.layers, loaded.max_model_len)
    assert decoder is not None
    decoder.bind(caches)
    return runner, decoder, caches


@torch.inference_mode()
def check_steps(runner: ModelRunner, decoder: cuda_decoder.CudaDecoder) -> None:
    """Two sequences: whole prompts, then a decode beside a chunk, then decodes."""
    for case in STEPS:
        meta = make_step(case).meta
        meta.block_tables = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32)  # the same blocks in every step
        rows = torch.repeat_interleave(torch.arange(2), torch.tensor(case.query_lens))
        meta.slot_mapping = meta.block_tables[rows, meta.positions // 16] * 16 + meta.positions % 16
        token_ids = torch.randint(VOCAB_SIZE, (case.num_tokens,), generator=torch.Generator().manual_seed(case.num_tokens))
        wanted = torch.arange(case.num_tokens)
        expected = runner._forward(token_ids[None], meta.positions[None], meta, wanted)
        logits, hidden = decoder(token_ids, meta.positions, meta, wanted)
        assert relative_error(logits, expected.logits.double()) < 5e-6
        assert relative_error(hidden, expected.hidden.double()) < 5e-6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_computes_what_the_modules_compute(architecture: str) -> None:
    runner, decoder, caches = make_decoder(architecture)
    check_steps(runner, decoder)
    for ours, theirs in zip(caches, runner.cache.layers, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_widths_that_are_no_powers_of_two() -> None:
    check_steps(*make_decoder("llama", hidden_size=60, intermediate_size=88, head_dim=20, num_attention_heads=6, num_key_value_heads=2)[:2])


def test_biases() -> None:
    check_steps(*make_decoder("llama", attention_bias=True, mlp_bias=True)[:2])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_weights_in_int8(architecture: str) -> None:
    check_steps(*make_decoder(architecture, int8=True, attention_bias=True)[:2])


def test_weights_in_int8_are_made_numbers_a_bounded_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merged ones and the head too: a graph would keep what a whole head takes."""
    most, sizes = 500, list[int]()

    def watched(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        sizes.append(codes.numel())
        return dequantize(codes, scale, dtype)

    runner, decoder, _ = make_decoder("llama", int8=True, attention_bias=True)
    monkeypatch.setattr(quantization, "MOST_DEQUANTIZED", most)
    monkeypatch.setattr(quantization, "dequantize", watched)
    check_steps(runner, decoder)
    assert max(sizes) <= most < decoder._head.weight.numel()


def test_the_modules_keep_their_weights_in_the_merged_ones() -> None:
    runner, decoder, _ = make_decoder("llama")
    attention = runner._model.model.layers[0].self_attn
    merged = decoder._layers[0].qkv.weight
    assert attention.q_proj.weight.data_ptr() == merged.data_ptr()
    assert attention.k_proj.weight.data_ptr() == merged[attention.q_proj.out_features :].data_ptr()


def test_it_computes_over_the_caches_it_was_bound_to_last() -> None:
    runner, decoder, caches = make_decoder("llama")
    check_steps(runner, decoder)
    before = [k.clone() for k, _ in caches]
    runner.cache.clear(8)
    others = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in caches]
    decoder.bind(others)
    check_steps(runner, decoder)
    assert all(torch.equal(k, kept) for (k, _), kept in zip(caches, before, strict=True))
    assert all(k.any() for k, _ in others)


def test_a_padded_row_writes_no_block() -> None:
    _, decoder, caches = make_decoder("llama")
    meta = make_step(Case(query_lens=(1, 1), seq_lens=(1, 1))).meta
    meta.seq_lens = torch.zeros_like(meta.seq_lens)
    meta.slot_mapping = torch.full_like(meta.slot_mapping, -1)
    meta.block_tables = torch.zeros_like(meta.block_tables)
    with torch.inference_mode():
        logits, _ = decoder(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), meta, torch.arange(2))
    assert logits.isfinite().all()
    assert not any(tensor.any() for cache in caches for tensor in cache)


def test_a_structure_that_is_not_known_is_left_to_its_modules() -> None:
    loaded = prepare_model(tiny_model("mixtral"), None, "mixtral")
    runner = ModelRunner(loaded, EngineConfig(num_blocks=8, max_batch_size=4, max_batch_tokens=64, attention="torch"))
    assert cuda_decoder.fuse(loaded.model, loaded.config, runner.layers, 64) is None


def test_recognition_asks_for_multiples_only_where_they_are_needed() -> None:
    runner, _, _ = make_decoder("llama")
    loaded = runner._loaded
    assert recognise(loaded.model, loaded.config, runner.layers, 64, frozenset({torch.float32}), multiple=1).rotary_dim == 16
