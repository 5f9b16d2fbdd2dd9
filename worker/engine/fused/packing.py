"""Weights in the order in which the native products stream them (``native/gemm.h``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.engine.native import memory
from worker.engine.native.library import MatrixStruct

PANEL = 32
TILE = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A linear layer's weight ``[n, k]`` in panels, and its bias in float32.

    Attributes:
        tiles: bfloat16, ``[n / 32, k / 32, 2, 16 input pairs, 16 outputs, 2]``, zeros where n or k was no multiple of 32.
    """

    tiles: Tensor
    bias: Tensor | None

    def struct(self) -> MatrixStruct:
        """Pointers into this, which must outlive them."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return MatrixStruct(self.tiles.data_ptr(), bias, self.tiles.shape[0] * PANEL, self.tiles.shape[1] * PANEL)


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """Pack a weight ``[n, k]`` and its bias ``[n]``."""
    rows, columns = weight.shape
    padded = functional.pad(weight.detach().to(torch.bfloat16), (0, -columns % PANEL, 0, -rows % PANEL))
    panels, steps = padded.shape[0] // PANEL, padded.shape[1] // PANEL
    tiles = memory.zeros((panels, steps, 2, TILE, TILE, 2), torch.bfloat16)
    tiles.copy_(padded.view(panels, 2, TILE, steps, TILE, 2).permute(0, 3, 1, 4, 2, 5))
    if bias is not None:
        bias = functional.pad(bias.detach().float(), (0, -rows % PANEL)).contiguous()
    return PackedMatrix(tiles, bias)


def pack_stacked(linears: list[nn.Linear]) -> PackedMatrix:
    """Pack linears that read the same input as one, their outputs one after the other."""
    return pack(torch.cat([linear.weight for linear in linears]), _stacked_bias(linears))


def pack_interleaved(gate: nn.Linear, up: nn.Linear) -> PackedMatrix:
    """Pack two linears as one whose panels are 16 outputs of the first and the same 16 of the second."""
    bias = _stacked_bias([gate, up])
    weight = torch.stack([gate.weight.view(-1, TILE, gate.in_features), up.weight.view(-1, TILE, up.in_features)], 1)
    if bias is not None:
        bias = bias.view(2, -1, TILE).transpose(0, 1).flatten()
    return pack(weight.flatten(0, 2), bias)


def _stacked_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears])
