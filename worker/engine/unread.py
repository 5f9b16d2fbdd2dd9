"""Values that cross between host and device without either waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class UnreadTokens(NamedTuple):
    """Last output tokens of some requests of a step that were sampled but not yet read by the host.

    Attributes:
        rows: of these requests among those that sample in the step.
        token_ids: ``[len(rows)]`` int64, on the device.
    """

    rows: Sequence[int]
    token_ids: Tensor


def to_device(values: Sequence[float] | Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list or an array as a tensor on the device; from pinned memory for CUDA, since a copy from other memory waits for the stream."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
