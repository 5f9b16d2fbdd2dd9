"""Runs the same requests through several engines, in turn: A B A B, each engine loaded once in its own process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from worker.bench.records import Run
from worker.bench.workloads import BenchRequest, Scenario

Results = Mapping[Scenario, Mapping[str, Sequence[Run]]]
"""A list of runs for each engine of each scenario, one per round; the others are compared with the first engine. A comparison that ended
early lacks the runs that it did not finish.
"""

_PROJECT = Path(__file__).parents[2]
_END_S = 60.0
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of a comparison.

    Attributes:
        module: of `worker.bench.drivers`.
        settings: the driver's settings.
        python: the interpreter that runs it.
    """

    name: str
    module: str
    settings: Mapping[str, Any]
    python: str = sys.executable


class Driver:
    """A driver process; `run` gives it requests and waits for its measurements.

    Raises:
        RuntimeError: the process ended, or did not generate as many tokens as asked.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.name
        path = os.pathsep.join(filter(None, (str(_PROJECT), os.environ.get("PYTHONPATH"))))
        command = [spec.python, "-m", f"worker.bench.drivers.{spec.module}", json.dumps(dict(spec.settings))]
        self._process = subprocess.Popen(  # noqa: S603 - the interpreter is the operator's choice
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            self._read()
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        """End the process, whatever it is doing; it ends what it has started."""
        self._process.terminate()
        self.close(_STOP_S)

    def close(self, timeout_s: float = _END_S) -> None:
        """End the process by closing its input; kill it if that takes longer than ``timeout_s``."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self) -> str:
        line = self._stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"engine {self.name} ended with exit code {self._process.returncode}")
        return line

    def run(self, requests: Sequence[BenchRequest]) -> Run:
        with suppress(BrokenPipeError):  # then there is nothing to read
            print(json.dumps([asdict(request) for request in requests]), file=self._stdin, flush=True)
        run = Run.from_json({**json.loads(self._read()), "engine": self.name})
        wanted = {request.id: request.max_tokens for request in requests}
        if {record.id: record.num_output_tokens for record in run.records} != wanted:
            raise RuntimeError(f"engine {self.name} generated {run.output_tokens} tokens, not the {sum(wanted.values())} asked for")
        return run


def compare(
    specs: Sequence[EngineSpec], scenarios: Sequence[Scenario], *, rounds: int, warmup: Sequence[BenchRequest]
) -> Generator[tuple[Scenario, Run], None, None]:
    """Run every scenario through every engine ``rounds`` times, in turn, and yield each run when it is finished.

    ``warmup`` goes through each engine first and is not counted.

    Raises:
        RuntimeError: an engine ended, or did not generate as many tokens as asked.
    """
    with ExitStack() as stack:
        drivers = [stack.enter_context(Driver(spec)) for spec in specs]
        for driver in drivers:
            driver.run(warmup)
        for _, scenario, driver in itertools.product(range(rounds), scenarios, drivers):
            yield scenario, driver.run(scenario.requests)
