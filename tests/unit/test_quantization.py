from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from producer.errors import ModelUnavailable
from tests.tiny_models import tiny_model
from worker.engine import quantization
from worker.engine.quantization import Int8Linear, dequantize, quantize_linears, quantize_rows

LARGEST = 2.0**126  # at float32's very end the product with the scale may round to infinity
numbers = st.floats(-LARGEST, LARGEST, width=32)
rows = st.lists(numbers, min_size=1, max_size=40)


def read_back(x: Tensor) -> Tensor:
    return dequantize(*quantize_rows(x), torch.float32)


@settings(deadline=None)
@given(rows)
def test_no_element_is_off_by_more_than_half_a_step(row: list[float]) -> None:
    x = torch.tensor(row)
    codes, scale = quantize_rows(x)
    assert codes.dtype == torch.int8
    assert codes.abs().max() <= 127
    assert scale.shape == (1,)
    error = (dequantize(codes, scale, torch.float32).double() - x.double()).abs().max()
    assert error <= 0.5 * scale.double() * (1 + 1e-5)


@settings(deadline=None)
@given(rows)
def test_the_sign_is_kept_and_the_order_of_magnitudes_too(row: list[float]) -> None:
    x = torch.tensor(row)
    codes, _ = quantize_rows(x)
    assert (codes * x.sign() >= 0).all()
    order = x.argsort()
    assert (codes[order].int().diff() >= 0).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1.0, LARGEST])
def test_rows_of_one_magnitude_read_back_as_they_were(value: float) -> None:
    x = torch.tensor([[value, -value, 0.0], [0.0, 0.0, 0.0]])
    step = max(value / 127, torch.finfo(torch.float32).tiny)
    assert torch.allclose(read_back(x), x, rtol=1e-6, atol=step / 2 if value < 1e-36 else 0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_reads_back_as_none_and_harms_no_other(value: float) -> None:
    x = torch.ones(3, 8)
    x[1, 5] = value
    read = read_back(x)
    assert not read[1].isfinite().any()
    assert torch.allclose(read[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_computes_in_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).to(dtype)
    x = torch.randn(5, 64).to(dtype)
    quantized = Int8Linear(linear)
    out = quantized(x)
    assert out.dtype == dtype
    weight_error = (dequantize(quantized.codes, quantized.scale, torch.float32) - linear.weight.float()).abs().max(1).values
    most = x.float().abs().sum(1, keepdim=True) * weight_error + 3e-2 * (dtype != torch.float32) + 1e-5
    assert ((out.float() - linear(x).float()).abs() <= most).all()


def test_a_layer_has_no_weight_to_mistake_its_codes_for() -> None:
    assert not hasattr(Int8Linear(nn.Linear(8, 8)), "weight")


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(input_ids=torch.arange(20)[None], use_cache=False).logits
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "opt", "olmo2", "smollm3"])
def test_a_model_of_linear_layers_stays_close_to_itself(architecture: str) -> None:
    model = tiny_model(architecture, initializer_range=0.1)
    expected = logits(model)
    quantize_linears(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    difference = (logits(model) - expected).norm() / expected.norm()
    assert 0 < difference < 0.05


def test_an_embedding_that_is_tied_to_the_head_stays_as_it_is() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    quantize_linears(model)
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "gpt2"])
def test_a_model_whose_weights_are_mostly_elsewhere_is_refused_unchanged(architecture: str) -> None:
    model = tiny_model(architecture)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelUnavailable, match=rf"quantization int8: only \d+% .* model type {architecture} "):
        quantize_linears(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    with pytest.raises(ModelUnavailable, match=r"model\.layers\.1\.mlp\.up_proj"):
        quantize_linears(model)


@pytest.mark.parametrize("most", [1, 48 * 7, 48 * 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_the_same_whatever_part_of_it_is_in_memory(
    dtype: torch.dtype, bias: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(48, 100, bias=bias, dtype=dtype).requires_grad_(False)
    layer = Int8Linear(linear)
    x = torch.randn(2, 5, 48, dtype=dtype)
    expected = functional.linear(x, dequantize(layer.codes, layer.scale, dtype), linear.bias)
    sizes: list[int] = []

    def watched(codes: Tensor, scale: Tensor, wanted: torch.dtype) -> Tensor:
        sizes.append(codes.numel())
        return dequantize(codes, scale, wanted)

    monkeypatch.setattr(quantization, "dequantize", watched)
    monkeypatch.setattr(quantization, "MOST_DEQUANTIZED", most)
    torch.testing.assert_close(layer(x), expected)
    assert max(sizes) <= max(most, 48)
    assert sum(sizes) == 48 * 100
