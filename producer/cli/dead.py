"""``headrace dead``: requests that were given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import click

from producer import codec
from producer.cli.group import complain
from producer.cli.options import open_client, queue_options, redis_errors
from producer.cli.output import print_json
from producer.client import Client
from producer.dead import DeadLetter, letters, purge, replay
from producer.errors import InvalidRequest, UnknownRequest

_ids = click.argument("ids", metavar="[ID]...", nargs=-1)
_all = click.option("--all", "everything", is_flag=True, help="All dead letters.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
_REFUSALS = {"busy": "is queued or running again", "answered": "was put again since it died, and has been answered"}


@click.group()
def dead() -> None:
    """List, show, replay and purge dead letters.

    An ID is the request's, or the dead letter's own (the first column of the list).
    """


@dead.command("list")
@queue_options
@_json
@click.option("--limit", type=click.IntRange(1), help="At most this many, oldest first.")
def list_(redis_url: str, queue: str, as_json: bool, limit: int | None) -> None:
    """List dead letters, oldest first, without their prompts."""
    with open_client(redis_url, queue) as client, redis_errors():
        for letter in islice(letters(client.redis, client.keys), limit):
            print_json(_summary(letter)) if as_json else click.echo(_line(letter))


@dead.command()
@click.argument("id")
@queue_options
@_json
def show(redis_url: str, queue: str, id: str, as_json: bool) -> None:  # noqa: A002 - the argument's name in the help
    """Show one dead letter with its prompt and its history."""
    with open_client(redis_url, queue) as client, redis_errors():
        [letter] = _find(client, [id])
    whole = _summary(letter) | {"message": letter.message, "history": letter.history, "request": _request(letter)}
    print_json(whole, indent=None if as_json else 2)


@dead.command("replay")
@_ids
@_all
@queue_options
def replay_(redis_url: str, queue: str, ids: tuple[str, ...], everything: bool) -> None:
    """Put dead letters back on their streams, with the same id and their history; prints their ids.

    One that cannot be put back stays and is reported on stderr; the others are put back, and the exit code is 1.
    """
    _for_each(redis_url, queue, ids, everything, _replay_one)


@dead.command("purge")
@_ids
@_all
@queue_options
def purge_(redis_url: str, queue: str, ids: tuple[str, ...], everything: bool) -> None:
    """Throw dead letters away; prints their ids."""
    _for_each(redis_url, queue, ids, everything, lambda client, letter: purge(client.redis, client.keys, letter))


def _replay_one(client: Client, letter: DeadLetter) -> bool:
    outcome = replay(client.redis, client.keys, letter)
    if outcome in _REFUSALS:
        raise InvalidRequest(f"{letter.id} {_REFUSALS[outcome]}", field="id")
    return outcome == "queued"


def _for_each(redis_url: str, queue: str, ids: Sequence[str], everything: bool, act: Any) -> None:
    if everything == bool(ids):
        raise click.UsageError("give either IDs or --all")
    refused = False
    with open_client(redis_url, queue) as client, redis_errors():
        for letter in _all_now(client) if everything else _find(client, ids):
            try:
                if act(client, letter):
                    click.echo(letter.id or letter.entry)
            except InvalidRequest as error:
                complain(error, f"dead letter {letter.entry}: ")
                refused = True
    if refused:
        raise click.exceptions.Exit(1)


def _all_now(client: Client) -> Iterator[DeadLetter]:
    """The letters there now: one that is replayed and dies again does not come up a second time."""
    return islice(letters(client.redis, client.keys), int(client.redis.xlen(client.keys.dead)))


def _find(client: Client, ids: Sequence[str]) -> list[DeadLetter]:
    """The letters of ``ids``, all or none; if a request died several times, the last one."""
    found: dict[str, DeadLetter] = {}
    for letter in letters(client.redis, client.keys):
        found |= {name: letter for name in (letter.id, letter.entry) if name in ids}
    for name in ids:
        if name not in found:
            raise UnknownRequest(f"no dead letter {name}")
    return [found[name] for name in ids]


def _summary(letter: DeadLetter) -> dict[str, Any]:
    labels = {name: letter.request.get(name.encode(), b"").decode(errors="replace") for name in ("source", "user", "task")}
    return {
        "entry": letter.entry,
        "id": letter.id,
        "tier": letter.tier,
        "code": letter.code,
        "attempts": letter.attempts,
        "deaths": len(letter.history) + 1,
        "worker": letter.worker,
        "ms": letter.ms,
        **labels,
    }


def _line(letter: DeadLetter) -> str:
    when = datetime.fromtimestamp(letter.ms / 1000, UTC).isoformat(timespec="seconds")
    return "\t".join((letter.entry, letter.id, letter.tier, letter.code, f"attempts={letter.attempts}", when))


def _request(letter: DeadLetter) -> dict[str, Any]:
    """The request's fields, with its body decoded if possible."""
    shown: dict[str, Any] = {}
    for name, value in letter.request.items():
        if name == b"history":
            continue
        try:
            shown[name.decode()] = (
                codec.decode_body(value, "msgpack" if name == b"msgpack" else "json") if name in (b"msgpack", b"json") else value.decode()
            )
        except (InvalidRequest, UnicodeDecodeError):
            shown[name.decode(errors="replace")] = f"({len(value)} bytes)"
    return shown
