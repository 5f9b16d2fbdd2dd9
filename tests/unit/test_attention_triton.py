"""Runs the tests of the Triton kernels, each set in an interpreter of its own.

Triton decides when it is first imported whether it interprets or compiles, and transformers imports it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 900  # for machines that do much else

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@dataclass(frozen=True)
class Run:
    """A run of test files in its own process, and where it writes."""

    process: subprocess.Popen[bytes]
    output: Path

    def assert_passes(self) -> None:
        assert self.process.wait(TIMEOUT_S) == 0, self.output.read_text()[-8000:]


def start(output: Path, *files: str, **environment: str) -> Run:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / file) for file in files)]
    with output.open("wb") as file:
        return Run(subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT), output)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Both at the same time: each takes minutes, and one core."""
    folder = tmp_path_factory.mktemp("triton")
    runs = {"compiled": start(folder / "compiled.txt", "compiled_attention_triton.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))}
    if interpreter_works():
        files = ("interpreted_attention_triton.py", "interpreted_cuda_decoder.py")
        runs["interpreted"] = start(folder / "interpreted.txt", *files, TRITON_INTERPRET="1")
    yield runs
    for run in runs.values():
        run.process.kill()
        run.process.wait()


def interpreter_works() -> bool:
    """Triton before 3.7 makes Python numbers of arrays of one element, which numpy 2.4 refuses."""
    import numpy as np
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) or np.lib.NumpyVersion(np.__version__) < "2.4.0"


def test_kernels_compile_for_cards_that_are_not_here(runs: dict[str, Run]) -> None:
    runs["compiled"].assert_passes()


def test_kernels_in_the_interpreter_compute_what_they_should(runs: dict[str, Run]) -> None:
    if "interpreted" not in runs:
        pytest.skip("the interpreter of this triton needs numpy < 2.4")
    runs["interpreted"].assert_passes()
