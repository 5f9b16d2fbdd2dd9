"""Importing the client is cheap, and loads nothing that a caller does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "structlog", "rich", "click", "rq", "worker")


def in_fresh_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("names", ["Client, SamplingParams", "AsyncClient", "errors, keys, wire, codec, status"])
def test_import_loads_nothing_heavy(names: str) -> None:
    loaded = json.loads(in_fresh_interpreter(f"import json, sys; from producer import {names}; print(json.dumps(sorted(sys.modules)))"))
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["producer", "producer.errors", "producer.keys", "producer.sampling", "producer.wire"])
def test_wire_types_need_no_redis(module: str) -> None:
    loaded = json.loads(in_fresh_interpreter(f"import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"))
    assert {name.partition(".")[0] for name in loaded}.isdisjoint({*HEAVY, "redis", "msgpack", "asyncio"})


def test_every_public_name_can_be_imported() -> None:
    in_fresh_interpreter("import producer; [getattr(producer, name) for name in producer.__all__]")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        in_fresh_interpreter("import producer; producer.Clinet")
    assert "AttributeError: module 'producer' has no attribute 'Clinet'" in failed.value.stderr


def test_client_adds_little_to_importing_redis() -> None:
    """Its own modules and msgpack's, and a handful of small ones of the standard library."""
    added = "before = set(sys.modules); from producer import Client; Client(); print(json.dumps(sorted(set(sys.modules) - before)))"
    names = json.loads(in_fresh_interpreter(f"import json, sys, redis; {added}"))
    others = [name for name in names if name.partition(".")[0] not in ("producer", "msgpack") and "cython" not in name]
    assert len(others) <= 10
    assert not [name for name in others if name.partition(".")[0] not in sys.stdlib_module_names]
