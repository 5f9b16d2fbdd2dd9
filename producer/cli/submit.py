"""``headrace submit``."""

from __future__ import annotations

import os
import queue as queues
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from producer import codec
from producer.cli.environment import REPEATABLE
from producer.cli.group import complain, exit_code
from producer.cli.options import open_client, queue_options
from producer.cli.output import print_json
from producer.client import Client, Handle
from producer.core import DEADLINE_GRACE_S
from producer.errors import HeadraceError, RedisUnavailable, WaitTimeout
from producer.keys import TIERS
from producer.options import new_id
from producer.wire import Chunk, Result

WINDOW = 256  # requests submitted and not yet printed
_READ_BYTES = 65536

_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max-tokens", int, "Most tokens to generate [default: 256]."),
    ("min-tokens", int, "No stop before this many tokens."),
    ("temperature", float, "0 is greedy [default: 1]."),
    ("top-p", float, "Nucleus sampling."),
    ("top-k", int, "Only the k likeliest tokens."),
    ("min-p", float, "Only tokens with at least this share of the likeliest token's probability."),
    ("repetition-penalty", float, "Divides logits of tokens seen."),
    ("presence-penalty", float, "Subtracted once from logits of tokens generated."),
    ("frequency-penalty", float, "Subtracted per occurrence."),
    ("seed", int, "Same seed, same answer."),
    ("n", int, "With --json: this many independent answers, in choices."),
    ("logprobs", int, "With --json: log-probabilities of this many likeliest tokens."),
)


def _sampling_options(command: Any) -> Any:
    for name, kind, about in reversed(_SAMPLING):
        command = click.option(f"--{name}", type=kind, help=about)(command)
    return command


@click.command()
@click.argument("prompt", required=False)
@queue_options
@click.option("--chat", is_flag=True, help="The prompt is a user's message: apply the model's chat template.")
@click.option("--stream", is_flag=True, help="Print the answer as it is generated.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer (with --stream also each chunk) as one line of JSON.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), help="Seconds to wait for an answer; a request put here is then cancelled."
)
@click.option("--tier", type=click.Choice(TIERS), default="realtime", show_default=True)
@click.option("--id", "request_id", help="The request's id, for one prompt [default: a new one].")
@click.option("--source", help="Label.")
@click.option("--user", help="Label.")
@click.option("--task", help="Label.")
@_sampling_options
@click.option("--stop", multiple=True, help=f"String that ends the answer; {REPEATABLE}.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Continue after the model's end of sequence.")
def submit(prompt: str | None, redis_url: str, queue: str, chat: bool, as_json: bool, timeout: float | None, **options: Any) -> None:
    """Submit PROMPT and print the answer.

    Without PROMPT, or with -, each line of stdin is a prompt. All are in flight together and answered in order.
    """
    request_id = options.pop("request_id")
    options = {name: value for name, value in options.items() if value not in (None, ())}
    if timeout is not None:
        options["deadline_s"] = timeout + DEADLINE_GRACE_S
    prompts: Iterable[str] = _stdin_lines() if prompt in (None, "-") else [prompt]
    if prompt in (None, "-") and request_id is not None:
        raise click.UsageError("--id is for one prompt")
    with open_client(redis_url, queue) as client:
        run = _Run(client, chat, timeout, options, _Printer(as_json, options["stream"]))
        run.answer_all(prompts, request_id, many=prompt in (None, "-"))


def _stdin_lines() -> Iterator[str]:
    """Lines of stdin as they come, blank ones left out.

    Read without Python's buffering: a thread that waits in a buffered read would block the interpreter's exit.
    """
    if sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or prompts on stdin, one per line")
    rest = b""
    while data := os.read(0, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="surrogateescape") for line in lines if line.strip())
    if rest.strip():
        yield rest.decode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class _Printer:
    """Writes answers to stdout."""

    as_json: bool
    stream: bool

    def answer(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait for the answer and print it; raises what `Handle.result` raises."""
        if self.stream:
            self._streamed(handle, timeout_s)
        elif self.as_json:
            print_json(_result(handle.result(timeout_s)))
        else:
            self._write(handle.result(timeout_s).text + "\n")

    def error(self, error: HeadraceError, request_id: str) -> None:
        """In JSON an error takes the answer's line; as text it goes to stderr only."""
        if self.as_json:
            print_json({"id": request_id, "error": codec.encode_error(error)})

    def _streamed(self, handle: Handle, timeout_s: float | None) -> None:
        begun = False
        try:
            for chunk in handle.stream(timeout_s):
                begun = True
                print_json(_chunk(handle.id, chunk)) if self.as_json else self._write(chunk.text)
        finally:
            if begun and not self.as_json:
                self._write("\n")
        if self.as_json:
            print_json(_result(handle.result(timeout_s)))

    def _write(self, text: str) -> None:
        click.echo(text, nl=False)
        sys.stdout.flush()


def _result(result: Result) -> dict[str, Any]:
    return codec.encode_result(result) | {"attempt": result.attempt}


def _chunk(request_id: str, chunk: Chunk) -> dict[str, Any]:
    return {"id": request_id, **codec.encode_chunk(chunk)}


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt's request: its handle, or why it was not accepted."""

    number: int
    request_id: str
    handle: Handle | HeadraceError
    asked_s: float


class _Run:
    """Submits prompts in a thread, prints the answers in this one, and cancels what is in flight when it is interrupted."""

    def __init__(self, client: Client, chat: bool, timeout_s: float | None, options: dict[str, Any], printer: _Printer) -> None:
        self._client = client
        self._chat = chat
        self._timeout_s = timeout_s
        self._options = options
        self._printer = printer
        self._asked: queues.Queue[_Asked | BaseException | None] = queues.Queue(WINDOW)
        self._in_flight: dict[str, None] = {}
        self._stop = threading.Event()

    def answer_all(self, prompts: Iterable[str], request_id: str | None, *, many: bool) -> None:
        """Raises the error of a single prompt; of many, each error is reported, and the first one gives the command's exit code."""
        threading.Thread(target=self._submit_all, args=(prompts, request_id), daemon=True).start()
        first_error = 0
        try:
            while (asked := self._next()) is not None:
                code = self._answer(asked, many)
                first_error = first_error or code
        except RedisUnavailable:
            raise
        except BaseException:
            self._cancel_all()
            raise
        if first_error:
            raise click.exceptions.Exit(first_error)

    def _next(self) -> _Asked | None:
        asked = self._asked.get()
        if isinstance(asked, BaseException):
            raise asked
        return asked

    def _answer(self, asked: _Asked, many: bool) -> int:
        """Print one answer; returns the exit code that it alone would give."""
        code = 0
        try:
            if isinstance(asked.handle, HeadraceError):
                raise asked.handle
            self._printer.answer(asked.handle, self._remaining_s(asked))
        except HeadraceError as error:
            code = self._failed(asked, error, many)
        self._in_flight.pop(asked.request_id, None)
        return code

    def _failed(self, asked: _Asked, error: HeadraceError, many: bool) -> int:
        if isinstance(error, WaitTimeout):
            self._cancel({asked.request_id} & self._in_flight.keys())
            error = WaitTimeout(f"no final reply within {self._timeout_s:g} s", request_id=asked.request_id)  # this wait was shorter
        self._printer.error(error, asked.request_id)
        if not many or isinstance(error, RedisUnavailable):
            self._in_flight.pop(asked.request_id, None)
            raise error
        complain(error, f"prompt {asked.number}: ")
        return exit_code(error)

    def _remaining_s(self, asked: _Asked) -> float | None:
        return None if self._timeout_s is None else max(0.0, asked.asked_s + self._timeout_s - time.monotonic())

    def _submit_all(self, prompts: Iterable[str], request_id: str | None) -> None:
        try:
            for number, prompt in enumerate(prompts, 1):
                if self._stop.is_set():
                    return
                self._asked.put(self._submit(number, prompt, request_id))
            self._asked.put(None)
        except BaseException as error:  # raised again by the command
            self._asked.put(error)

    def _submit(self, number: int, prompt: str, given_id: str | None) -> _Asked:
        request_id = given_id or new_id()
        content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        if given_id is None:
            self._in_flight[request_id] = None  # before it is put: a cancellation may come first
        asked_s = time.monotonic()
        try:
            handle = self._client.submit(**content, id=request_id, **self._options)
        except HeadraceError as error:
            return _Asked(number, request_id, error, asked_s)
        if given_id and handle.is_new:  # otherwise it is another caller's, who may have more time
            self._in_flight[request_id] = None
        return _Asked(number, request_id, handle, asked_s)

    def _cancel_all(self) -> None:
        self._stop.set()
        self._cancel(list(self._in_flight))

    def _cancel(self, request_ids: Iterable[str]) -> None:
        """Best effort: whoever interrupted us does not wait for a slow Redis."""
        with suppress(HeadraceError):
            for request_id in request_ids:
                self._client.abandon(request_id)
