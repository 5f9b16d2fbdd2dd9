"""The native kernels as this CPU runs them, and as other x86-64 CPUs do.

Instructions that this CPU has beyond theirs are left out, those that it lacks are emulated in C (``native/emulated_x86.h``): so the
branches for AVX-512, its bfloat16 and AMX are tested wherever the tests run.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import tempfile
from pathlib import Path

import pytest

from worker.engine.native.build import build
from worker.engine.native.library import kernels, typed

_EMULATED = ("-O3", "-include", str(Path(__file__).parent / "native" / "emulated_x86.h"))
_OPTIONS = {
    "amx": (*_EMULATED, "-DEMULATE_AMX"),
    "avx512_bf16": (*_EMULATED, "-DEMULATE_AVX512_BF16", "-DHEADRACE_NO_AMX"),
    "avx512": (*_EMULATED, "-mno-avx512bf16", "-DHEADRACE_NO_AMX"),
    "avx2": ("-mno-avx512f", "-DHEADRACE_NO_AMX"),
    "sse2": ("-mno-avx512f", "-mno-avx2", "-mno-fma", "-DHEADRACE_NO_AMX"),
}
INSTRUCTION_SETS = ("native", *_OPTIONS)


@functools.cache
def kernels_for(instruction_set: str) -> ctypes.CDLL:
    """The kernels for one of `INSTRUCTION_SETS`, built once per run. Skips the test if they cannot be built."""
    lib = kernels()
    if lib is None:
        pytest.skip("no C compiler")
    if instruction_set == "native":
        return lib
    if platform.machine() != "x86_64":
        pytest.skip("instruction sets of x86-64")
    with tempfile.TemporaryDirectory() as directory:
        return typed(ctypes.CDLL(str(build(Path(directory), _OPTIONS[instruction_set]))))
