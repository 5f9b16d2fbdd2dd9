"""Tests that need a CUDA device: see `ops/bench/GPU.md`. Without one, only those run whose logic can be tried on the CPU."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
torch.set_float32_matmul_precision("highest")  # no TF32, which NVIDIA's images turn on in the environment


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Takes structlog's keyword arguments into the message."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return f"{msg} {kwargs}", {}


if importlib.util.find_spec("structlog") is None:  # the engine logs through it; a GPU machine may have torch and little else
    structlog = ModuleType("structlog")
    structlog.get_logger = lambda name: _Log(logging.getLogger(name), {})  # type: ignore[attr-defined]  # a stand-in
    sys.modules["structlog"] = structlog


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those whose graph capture may fail in a way that spoils torch's allocator for the process come last."""
    for item in items:
        if HERE in item.path.parents and _parameters(item).get("device") != "cpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: HERE in item.path.parents and item.get_closest_marker("experts") is not None)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test whose logic is also tried on the CPU."""
    return str(request.param)


@pytest.fixture
def free_bytes() -> int:
    """Unused memory of the device."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free
