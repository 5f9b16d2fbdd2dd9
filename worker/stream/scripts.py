"""The worker's Lua scripts, and running several of them in one round trip."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

from producer.scripts import Argument, Script

ScriptCall = tuple[Script, Sequence[str], Sequence[Argument]]


@cache
def load(name: str) -> Script:
    """The script ``lua/<name>.lua``, with ``lua/fence.lua`` inserted after its first line (which holds the flags)."""
    folder = resources.files(__package__).joinpath("lua")
    flags, _, body = folder.joinpath(f"{name}.lua").read_text(encoding="utf-8").partition("\n")
    fence = folder.joinpath("fence.lua").read_text(encoding="utf-8")
    source = f"{flags}\n{fence}\n{body}"
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 - Redis names scripts so


def run(client: redis.Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run ``calls`` in order in one round trip, and return each one's reply.

    Raises:
        redis.RedisError: the first error of any of them; those after it were run nevertheless.
    """
    replies = run_each(client, calls)
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


def run_each(client: redis.Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run ``calls`` in order in one round trip, and return each one's reply, or a `ResponseError` if the server refused it.

    Running any of our scripts twice has the effect of running it once, so if the server has forgotten one, all are sent again.

    Raises:
        redis.RedisError: the server could not be reached.
    """
    replies = _send(client, calls)
    if any(isinstance(reply, NoScriptError) for reply in replies):
        for script in {script.name: script for script, _, _ in calls}.values():
            client.execute_command(*script.load_command)
        replies = _send(client, calls)
    return replies


def _send(client: redis.Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for script, keys, args in calls:
            pipeline.execute_command(*script.command(keys, args))
        return pipeline.execute(raise_on_error=False)
