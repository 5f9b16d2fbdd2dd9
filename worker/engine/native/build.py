"""Builds the C kernels with the machine's own compiler, once per (sources, compiler, CPU), and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import structlog

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
# The first that compiles is used. Partial redundancy elimination makes GCC move a kernel's sums between registers, and spill them.
_VARIANTS = (
    ("-march=native", "-fopenmp", "-fno-tree-pre"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    (),
)
_TIMEOUT_SECONDS = 120
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18

log = structlog.get_logger("headrace.engine")


class BuildFailed(Exception):
    """There is no compiler, or no way of calling it worked; the message says why."""


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, built if this machine has not built them yet; None if that is impossible (logged once).

    torch must be loaded first: the kernels then run on torch's OpenMP threads instead of bringing a second pool.
    """
    import torch  # noqa: F401  # loads the OpenMP runtime

    try:
        return ctypes.CDLL(str(build(_cache_directory())))
    except (BuildFailed, OSError) as error:
        log.warning("no C kernels: the torch path serves, slower, with the same results", reason=str(error))
        return None


def build(directory: Path, options: tuple[str, ...] = ()) -> Path:
    """Path of the shared object in ``directory``, compiled if it is not there. Safe for processes that race.

    Args:
        options: for the compiler, after ours; tests use them to remove or add instruction sets.

    Raises:
        BuildFailed: no compiler, or it failed.
        OSError: the directory cannot be written.
    """
    compiler = _compiler()
    if not _amx_allowed():
        options = ("-DHEADRACE_NO_AMX", *options)
    target = directory / f"kernels-{_key(compiler, options)}.so"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            compiled = Path(scratch) / "kernels.so"
            _compile(compiler, options, compiled)
            compiled.replace(target)
    return target


def _cache_directory() -> Path:
    root = os.environ.get("HEADRACE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "headrace") / "native"


def _compiler() -> str:
    path = shutil.which(os.environ.get("CC", "cc"))
    if path is None:
        raise BuildFailed("no C compiler (cc) is installed")
    return path


def _compile(compiler: str, options: tuple[str, ...], output: Path) -> None:
    sources = sorted(str(path) for path in _SOURCES.glob("*.c"))
    message = ""
    for variant in _VARIANTS:
        command = [compiler, *_FLAGS, *variant, *options, *sources, "-o", str(output), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)  # noqa: S603  # the user's compiler
        except subprocess.TimeoutExpired as error:
            raise BuildFailed(f"{compiler} took more than {_TIMEOUT_SECONDS} s") from error
        if done.returncode == 0:
            return
        message = message or done.stderr.strip()
    raise BuildFailed(f"{compiler} failed: {message[:500]}")


def _key(compiler: str, options: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted((*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_SECONDS, check=False).stdout  # noqa: S603  # ditto
    digest.update(version + repr((compiler, _FLAGS, _VARIANTS, options)).encode() + _cpu_features().encode())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """What distinguishes CPUs for ``-march=native``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@functools.cache
def _amx_allowed() -> bool:
    """Asks Linux for permission to use the tile registers in this process; every process must ask before it uses them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)
