"""Run the same requests through several engines, in turn: A B A B, each engine loaded once in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from worker.bench.records import Run
from worker.bench.workloads import BenchRequest

_PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of a comparison: the driver module, the settings it is given, and the interpreter that runs it."""

    name: str
    module: str
    settings: Mapping[str, Any]
    python: str = sys.executable
    environment: Mapping[str, str] | None = None


class Driver:
    """A driver process; `run` hands it requests and waits for what it measured."""

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.name
        environment = {**os.environ, "PYTHONPATH": str(_PROJECT), **(spec.environment or {})}
        command = [spec.python, "-m", f"worker.bench.drivers.{spec.module}", json.dumps(dict(spec.settings))]
        self._process = subprocess.Popen(  # noqa: S603 - the interpreter is the operator's choice
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"engine {self.name} ended with exit code {self._process.wait()}")
        return line

    def run(self, requests: Sequence[BenchRequest]) -> Run:
        print(json.dumps([asdict(request) for request in requests]), file=self._stdin, flush=True)
        return Run.from_json({**json.loads(self._read()), "engine": self.name})


def compare(
    specs: Sequence[EngineSpec],
    requests: Sequence[BenchRequest],
    *,
    rounds: int,
    warmup: Sequence[BenchRequest],
    on_run: Callable[[Run], None],
) -> dict[str, list[Run]]:
    """Run every engine ``rounds`` times in turn; ``warmup`` goes through each engine first and is not counted."""
    runs: dict[str, list[Run]] = {spec.name: [] for spec in specs}
    with ExitStack() as stack:
        drivers = [stack.enter_context(Driver(spec)) for spec in specs]
        for driver in drivers:
            driver.run(warmup)
        for _ in range(rounds):
            for driver in drivers:
                run = driver.run(requests)
                runs[driver.name].append(run)
                on_run(run)
    return runs
