from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.instruction_sets import kernels_for
from worker.engine.native import build as native
from worker.engine.native.build import BuildFailed, build
from worker.engine.native.library import typed

needs_compiler = pytest.mark.skipif(native.load_library() is None, reason="no C compiler")


@needs_compiler
def test_compiles_once(tmp_path: Path) -> None:
    first = build(tmp_path)
    written = first.stat().st_mtime_ns
    assert build(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [first]


@needs_compiler
def test_processes_that_race_end_with_one_library(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from worker.engine.native.build import build; print(build(Path({str(tmp_path)!r})))"
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: subprocess.check_output([sys.executable, "-c", program], text=True).strip(), range(2)))
    assert paths == {str(path) for path in tmp_path.iterdir()}


@needs_compiler
def test_other_options_make_another_library(tmp_path: Path) -> None:
    assert build(tmp_path) != build(tmp_path, ("-DHEADRACE_NO_AMX",))


@needs_compiler
@pytest.mark.parametrize(("instruction_set", "branch"), [("amx", b"amx"), ("avx512_bf16", b"avx512_bf16"), ("sse2", b"portable")])
def test_tests_for_other_cpus_run_their_branches(instruction_set: str, branch: bytes) -> None:
    assert kernels_for(instruction_set).headrace_isa() == branch


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_compiles_with_the_instructions_that_tests_emulate(tmp_path: Path) -> None:
    """Whether or not this CPU has them; to ask which branch it is needs none of them."""
    library = build(tmp_path, ("-march=sapphirerapids", "-UHEADRACE_NO_AMX"))
    assert typed(ctypes.CDLL(str(library))).headrace_isa() == b"amx"


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(BuildFailed, match="no C compiler"):
        build(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildFailed, match="out of luck"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_kernels_no_backend_is_offered(tmp_path: Path) -> None:
    program = "import torch; from worker.engine.attention.cpu_backend import supports; print(supports(torch.float32, 4, 2, 64, 16))"
    environment = {"CC": str(tmp_path / "none"), "HEADRACE_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (done.stdout + done.stderr).count("no C kernels") == 1
