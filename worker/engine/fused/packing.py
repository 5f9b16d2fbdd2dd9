"""Weights in the order in which the native products stream them (``native/gemm.h``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.engine.native import memory
from worker.engine.native.library import MatrixStruct, pointer
from worker.engine.quantization import Linear, stacked

PANEL = 32
TILE = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A linear layer's weight ``[n, k]`` in panels, and its bias in float32.

    Attributes:
        tiles: bfloat16, ``[n / 32, k / 32, 2, 16 input pairs, 16 outputs, 2]``, padded with zeros to multiples of 32; or
            int8, the last two dimensions exchanged.
        scale: of int8, float32, one per output.
    """

    tiles: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def struct(self) -> MatrixStruct:
        """Pointers into this, which must outlive them."""
        return MatrixStruct(
            tiles=self.tiles.data_ptr(),
            bias=pointer(self.bias),
            scale=pointer(self.scale),
            n=self.tiles.shape[0] * PANEL,
            k=self.tiles.shape[1] * PANEL,
        )


def pack(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> PackedMatrix:
    """Pack a weight ``[n, k]``, its bias ``[n]`` and, of int8 codes, its scales ``[n, 1]``."""
    rows, columns = weight.shape
    dtype, order = (torch.bfloat16, (0, 3, 1, 4, 2, 5)) if scale is None else (torch.int8, (0, 3, 1, 4, 5, 2))
    padded = functional.pad(weight.detach().to(dtype), (0, -columns % PANEL, 0, -rows % PANEL))
    panels, steps = padded.shape[0] // PANEL, padded.shape[1] // PANEL
    ordered = padded.view(panels, 2, TILE, steps, TILE, 2).permute(order)
    tiles = memory.zeros(ordered.shape, dtype)
    tiles.copy_(ordered)
    return PackedMatrix(tiles, _padded(bias, rows), _padded(scale, rows))


def pack_stacked(linears: Sequence[Linear]) -> PackedMatrix:
    """Pack linears that read the same input as one, their outputs one after the other."""
    return pack(*stacked(linears))


def pack_interleaved(gate: Linear, up: Linear) -> PackedMatrix:
    """Pack two linears as one whose panels are 16 outputs of the first and the same 16 of the second."""
    weight, bias, scale = (None if tensor is None else _interleaved(tensor) for tensor in stacked([gate, up]))
    assert weight is not None
    return pack(weight, bias, scale)


def _interleaved(rows: Tensor) -> Tensor:
    """Interleaves two halves of rows: 16 of the first, then 16 of the second, and so on."""
    return rows.view(2, -1, TILE, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _padded(per_output: Tensor | None, rows: int) -> Tensor | None:
    return None if per_output is None else functional.pad(per_output.detach().float().flatten(), (0, -rows % PANEL)).contiguous()
