"""Lua scripts, kept as files beside the package that owns them.

A script is called by its hash. A server that does not know it (restarted, failed over, flushed)
answers NOSCRIPT, and is then sent the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its text, and the SHA-1 hash by which Redis knows it."""

    name: str
    source: str
    sha: str

    def command(self, keys: Iterable[str], args: Iterable[Argument] = ()) -> tuple[Argument, ...]:
        """The EVALSHA command, for a caller that handles NOSCRIPT."""
        keys = tuple(keys)
        return ("EVALSHA", self.sha, len(keys), *keys, *args)

    @property
    def load_command(self) -> tuple[Argument, ...]:
        """The command that makes the server know it."""
        return ("SCRIPT", "LOAD", self.source)

    def __call__(self, client: redis.Redis, keys: Iterable[str], args: Iterable[Argument] = ()) -> Any:
        """Run it on ``client`` (not a pipeline); returns the reply as redis-py gives it."""
        command = self.command(keys, args)
        try:
            return client.execute_command(*command)
        except NoScriptError:
            return client.execute_command("EVAL", self.source, *command[2:])


@cache
def load(name: str, package: str = "producer") -> Script:
    """The script ``<package>/lua/<name>.lua``."""
    source = resources.files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 - Redis names scripts so
