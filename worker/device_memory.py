"""How much memory a device has, and how much of it this process takes."""

from __future__ import annotations

import os
from pathlib import Path

from worker.metrics import MemoryKind

_STATM = Path("/proc/self/statm")


def device_bytes(device: str, kind: MemoryKind) -> float:
    """Bytes of ``device`` (``cpu``, ``cuda:0``): ``allocated`` in tensors, ``reserved`` from the device, in ``total``.

    On a CPU the first two are both the resident memory of this process, 0 if the system does not tell.
    """
    if device.startswith("cuda"):
        return _cuda_bytes(device, kind)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if kind == "total":
        return float(os.sysconf("SC_PHYS_PAGES") * page_bytes)
    return float(int(_STATM.read_text().split()[1]) * page_bytes) if _STATM.exists() else 0.0


def _cuda_bytes(device: str, kind: MemoryKind) -> float:
    import torch

    if kind == "total":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(torch.cuda.memory_allocated(device) if kind == "allocated" else torch.cuda.memory_reserved(device))
