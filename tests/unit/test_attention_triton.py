"""Runs the tests of the Triton kernels, each set in an interpreter of its own.

Triton decides when it is first imported whether it interprets or compiles, and transformers imports it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 900  # for machines that do much else

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def run_tests(*files: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / file) for file in files)]
    done = subprocess.run(command, check=False, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def interpreter_works() -> bool:
    """Triton before 3.7 makes Python numbers of arrays of one element, which numpy 2.4 refuses."""
    import numpy as np
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) or np.lib.NumpyVersion(np.__version__) < "2.4.0"


def test_kernels_in_the_interpreter_compute_what_they_should() -> None:
    if not interpreter_works():
        pytest.skip("the interpreter of this triton needs numpy < 2.4")
    run_tests("interpreted_attention_triton.py", "interpreted_cuda_decoder.py", TRITON_INTERPRET="1")


def test_kernels_compile_for_cards_that_are_not_here(tmp_path: Path) -> None:
    run_tests("compiled_attention_triton.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
