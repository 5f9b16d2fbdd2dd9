"""The files of a bulk job. They are the only record of what is done.

Lines are appended to ``<output>.part`` and ``<errors>.part``, which are renamed when the job is complete. A line that a crash
cut off is removed; its request is sent again under the same id, and answered from the reply that exists already.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from producer import codec
from producer.bulk.lines import MAX_LINE_BYTES, usage_of
from producer.bulk.spec import BulkSpec
from producer.errors import InternalError, InvalidRequest
from producer.wire import Usage

LOCK_TIMEOUT_S = 60.0
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Extent:
    """The length of an input.

    Attributes:
        total: lines that are not blank.
        last: number of the last of them.
    """

    total: int = 0
    last: int = 0

    @property
    def num_blank(self) -> int:
        """Blank lines before the last one that is not."""
        return self.last - self.total

    @classmethod
    def of(cls, path: str) -> Extent:
        """Read a file through, as `read_lines` does."""
        total = last = 0
        for last, _ in read_lines(path):  # noqa: B007 - the last one counts
            total += 1
        return cls(total, last)


def read_lines(path: str) -> Iterator[tuple[int, str | None]]:
    """Number (from 1) and text of each line that is not blank; the text is None if it is too long or not UTF-8."""
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                _skip_line(file)
                yield number, None
            elif raw.strip():
                yield number, _decoded(raw)


def _skip_line(file: BinaryIO) -> None:
    while (raw := file.readline(MAX_LINE_BYTES)) and not raw.endswith(b"\n"):
        pass


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        return None


class OutputFiles:
    """Output and errors of one job, open for one run of it at a time.

    Attributes:
        resumed: an earlier run of the job has had them.
        done: numbers of the lines that are answered, in either file.
        succeeded, failed, usage: counts over all runs.
    """

    def __init__(self, spec: BulkSpec) -> None:
        self._spec = spec
        self.resumed = False
        self.done: set[int] = set()
        self.succeeded = 0
        self.failed = 0
        self.usage = Usage()
        self._output: BinaryIO | None = None
        self._errors: BinaryIO | None = None

    def __enter__(self) -> OutputFiles:
        """Take the files, and read what earlier runs have written.

        Raises:
            InvalidRequest: the output exists and is not this job's.
            InternalError: another run of this job holds them.
        """
        self.resumed = any(path.exists() for path in (Path(self._spec.output), _part(self._spec.output)))
        self._output = self._open(self._spec.output)
        self._errors = self._open(self._spec.errors)
        for record in _records(self._output):
            self._take(record, succeeded=True)
        for record in _records(self._errors):
            self._take(record, succeeded=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._output, self._errors):
            if file is not None:
                file.close()

    def write_answer(self, number: int, record: Mapping[str, Any]) -> None:
        assert self._output is not None
        _append(self._output, record)
        self._count(number, record, succeeded=True)

    def write_failure(self, number: int, record: Mapping[str, Any]) -> None:
        assert self._errors is not None
        _append(self._errors, record)
        self._count(number, record, succeeded=False)

    def finish(self) -> None:
        """The job is complete: give the files their final names. An empty errors file is not kept."""
        for path, file, keep in ((self._spec.errors, self._errors, self.failed > 0), (self._spec.output, self._output, True)):
            assert file is not None
            os.fsync(file.fileno())
            part = _part(path)
            part.rename(path) if keep else part.unlink()

    def _open(self, path: str) -> BinaryIO:
        """The part file, locked and at its end; a file that an earlier run completed becomes a part file again."""
        part = _part(path)
        if Path(path).exists() and not part.exists():
            self._check_ours(Path(path))
            Path(path).rename(part)
        file = part.open("a+b", buffering=0)
        _lock(file)
        if not _is_at(file, part):  # the run that held it has finished the job meanwhile
            file.close()
            return self._open(path)
        _cut_torn_line(file)
        return file

    def _check_ours(self, path: Path) -> None:
        with path.open("rb") as file:
            first = file.readline()
        try:
            ours = self._spec.line_number(json.loads(first)["id"]) is not None
        except (ValueError, LookupError, TypeError, AttributeError):
            ours = not first
        if not ours:
            raise InvalidRequest(f"{path} exists and is not of this job", field="output")

    def _take(self, record: Mapping[str, Any], *, succeeded: bool) -> None:
        number = self._spec.line_number(str(record.get("id")))
        if number is None:
            raise InvalidRequest("the output holds lines that are not of this job", field="output")
        self._count(number, record, succeeded=succeeded)

    def _count(self, number: int, record: Mapping[str, Any], *, succeeded: bool) -> None:
        self.done.add(number)
        self.succeeded += succeeded
        self.failed += not succeeded
        if succeeded:
            usage = usage_of(record)
            self.usage = Usage(self.usage.prompt_tokens + usage.prompt_tokens, self.usage.completion_tokens + usage.completion_tokens)


def _part(path: str) -> Path:
    return Path(path + ".part")


def _lock(file: Any) -> None:
    """Wait until no other run holds the file: a run may outlive its worker for a moment."""
    deadline_at_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_at_s:
                raise InternalError("another run of this job holds its output") from None
            time.sleep(0.1)
        else:
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _cut_torn_line(file: Any) -> None:
    """Remove what follows the last newline, searching backwards."""
    end = position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        file.truncate(position)


def _records(file: BinaryIO) -> Iterator[dict[str, Any]]:
    with open(file.name, "rb") as reader:
        for raw in reader:
            yield json.loads(raw)


def _append(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """One write per line: a process that is killed leaves whole lines, or one torn line at the very end."""
    data = codec.encode_body(record, "json") + b"\n"
    written = file.write(data)
    while written < len(data):  # a full disk raises; a signal may cut a large write short
        written += file.write(data[written:])
