"""TLS for the tests: which server can serve it, and certificates for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import binary

TLS_KIND = "redis7"  # Debian's; the servers of the Python packages are built without TLS
needs_tls = pytest.mark.skipif(
    binary(TLS_KIND) is None or shutil.which("openssl") is None, reason="needs a server that was built with TLS, and openssl"
)


def make_certificates(folder: Path) -> None:
    """Make an authority ``ca.crt``, and ``redis.crt`` and ``redis.key`` of its own for either end of a connection to 127.0.0.1."""
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=ca -keyout ca.key -out ca.crt",
        "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout redis.key -out redis.csr",
        "x509 -req -in redis.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 1 -copy_extensions copy -out redis.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
