"""Memory for what the kernels stream: on 2 MiB pages if the system provides them.

On 4 KiB pages each scattered KV block costs a page walk, and walks are long in a virtual machine.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_SMALLEST = 1 << 21


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose first byte is aligned to 64; pages are taken as they are first touched."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALLEST:
        raw = torch.zeros(size + 64, dtype=torch.uint8)
        start = -raw.data_ptr() % 64
        return raw[start : start + size].view(dtype).view(*shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
