"""Checks that nothing waits for the device: on CUDA torch reports waits; on the CPU they are recognised by their operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.engine.cuda_graphs import waits_raise

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount", "repeat_interleave"}


class Watch(TorchDispatchMode):
    """Notes the operations whose result, or its shape, the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in WAITS or by_mask:
            self.waits.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Inside, nothing may wait for a device of this kind."""
    if device == "cuda":
        with waits_raise():
            yield
    else:
        with Watch() as watch:
            yield
        assert not watch.waits
