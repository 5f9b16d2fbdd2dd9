"""Symmetric int8: rows of codes in -127..127, with one scale per row from its largest magnitude.

Rounding to nearest costs an element at most half its row's scale (Jacob et al., "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", 2018, without zero points).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional

from producer.errors import ModelUnavailable
from worker.engine.config import SCALE_BYTES

LARGEST_CODE = 127
MOST_DEQUANTIZED = 1 << 24  # elements: 64 MiB in float32, besides their copy in the dtype
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that a row of zeros is not divided by zero
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")  # the few weights that choose experts: left as they are
_LEAST_SHARE = 0.5  # of the decoder's weights that must be in linear layers, or int8 would gain almost nothing

log = structlog.get_logger("headrace.engine")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension.

    Returns:
        Codes, int8 of the same shape, and scales, float32 ``[..., 1]``. A row with a NaN or an infinity has NaN for its scale, so
        that all of it reads back as NaN.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp_min(_SMALLEST_SCALE)
    return (x / scale).nan_to_num(0.0).round().to(torch.int8), scale.where(scale.isfinite(), torch.nan)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for, rounded once to ``dtype``."""
    return (codes * scale).to(dtype)


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with an int8 weight: ``[..., k]`` to ``[..., n]``, computed in the input's dtype.

    At most `MOST_DEQUANTIZED` elements of the weight are dequantized at a time. Nothing here waits for the device.

    Args:
        codes: ``[n, k]``; scale ``[n, 1]``, bias ``[n]``.
    """
    num_outputs, num_inputs = codes.shape
    out = x.new_empty(*x.shape[:-1], num_outputs)
    rows = max(1, MOST_DEQUANTIZED // num_inputs)
    for start in range(0, num_outputs, rows):
        part = slice(start, start + rows)
        weight = dequantize(codes[part], scale[part], x.dtype)
        out[..., part] = functional.linear(x, weight, None if bias is None else bias[part])
    return out


def with_scale(x: Tensor) -> Tensor:
    """Rows ``[..., D]`` quantised, each followed by its scale: int8 ``[..., D + SCALE_BYTES]``."""
    codes, scale = quantize_rows(x)
    return torch.cat([codes, scale.view(torch.int8)], -1)


def without_scale(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in rows of `with_scale`, ``[..., D]``."""
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return dequantize(codes, scale.contiguous().view(torch.float32), dtype)


class Int8Linear(nn.Module):
    """A linear layer with its weight in int8, one scale per output; it computes in its input's dtype.

    There is no attribute ``weight``: model code that reads it directly fails, instead of taking codes for weights.

    Attributes:
        codes: int8 ``[out_features, in_features]``.
        scale: float32 ``[out_features, 1]``.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        codes, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return linear_int8(x, self.codes, self.scale, self.bias)


Linear = nn.Linear | Int8Linear


def stored_weight(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """The weight as stored, ``[n, k]``, and if it is int8 its scales ``[n, 1]``."""
    return (linear.codes, linear.scale) if isinstance(linear, Int8Linear) else (linear.weight.detach(), None)


def store_weight(linear: Linear, values: Tensor) -> None:
    """Let a layer hold other memory for the values of `stored_weight`: the same values elsewhere, or none."""
    if isinstance(linear, Int8Linear):
        linear.codes = values
    else:
        linear.weight = nn.Parameter(values, requires_grad=False)


def stacked(linears: Sequence[Linear]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Linears that read the same input, stacked by output: weight as stored, bias, scales. A single one is not copied."""
    weights, scales = zip(*map(stored_weight, linears), strict=True)
    biases = [linear.bias for linear in linears]
    if len(linears) == 1:
        return weights[0], biases[0], scales[0]
    bias = None
    if (given := next((bias for bias in biases if bias is not None), None)) is not None:
        bias = torch.cat([given.new_zeros(n.out_features) if n.bias is None else n.bias.detach() for n in linears])
    return torch.cat(weights), bias, None if scales[0] is None else torch.cat(scales)


def quantize_linears(model: Any) -> None:
    """Quantise the linear layers of a ``...ForCausalLM``, including its output head. An embedding that is tied to the head stays.

    Raises:
        ModelUnavailable: most of its weights are elsewhere (experts, convolutions), or a weight is not finite.
    """
    linears = linear_layers(model)
    for name, linear in linears.items():
        quantized = Int8Linear(linear)
        if not quantized.scale.isfinite().all():
            raise ModelUnavailable(f"quantization int8: the weight of {name} has numbers that are not finite")
        model.set_submodule(name, quantized)
    log.info("weights are int8", layers=len(linears))


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """The layers of a ``...ForCausalLM`` that are quantised, by name. Raises `ModelUnavailable` if these are too few."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and not _ROUTER.search(name)}
    _check_share(model, linears)
    return linears


def _check_share(model: Any, linears: dict[str, nn.Linear]) -> None:
    embedding = model.get_input_embeddings().weight
    matrices = {p for p in model.get_decoder().parameters() if p.ndim > 1 and p is not embedding}
    quantized = sum(linear.weight.numel() for linear in linears.values() if linear.weight in matrices)
    share = quantized / sum(matrix.numel() for matrix in matrices)
    if share < _LEAST_SHARE:
        kind = model.config.model_type
        raise ModelUnavailable(f"quantization int8: only {share:.0%} of the decoder's weights of model type {kind} are in linear layers")
