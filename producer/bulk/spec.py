"""The parameters of a bulk job, as plain values that JSON can carry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from producer import validate
from producer.errors import InvalidRequest
from producer.keys import check_name

Order = Literal["input", "completion"]
ORDERS: tuple[Order, ...] = ("input", "completion")
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")


def check_job_id(value: object) -> str:
    """Return ``value`` if it can be the beginning of request ids and an rq job's id, else raise `InvalidRequest`."""
    if not isinstance(value, str) or not _JOB_ID.match(value):
        raise validate.invalid("id", "1-80 characters of [A-Za-z0-9_-]")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSpec:
    """One bulk job.

    Attributes:
        job_id: the rq job's id, and the beginning of the ids of all its requests.
        input, output, errors: absolute paths, as the bulk worker sees them.
        window: most requests on the queue at once.
        order: of the output lines: as in the input, or as answers come.
        retries: how often a line is sent again after a retryable error; a reply that expired unread does not count as one.
        source: the label that its requests carry, for fairness and metrics.
        queue: the queue that they are put on.
    """

    job_id: str
    input: str
    output: str
    errors: str
    window: int = 256
    order: Order = "input"
    retries: int = 3
    source: str = "bulk"
    queue: str = "default"

    def __post_init__(self) -> None:
        check_job_id(self.job_id)
        check_name("queue", self.queue)
        validate.integer("window", self.window, 1, 100_000)
        validate.integer("retries", self.retries, 0, 1000)
        if self.order not in ORDERS:
            raise validate.invalid("order", f"one of {', '.join(ORDERS)}")
        paths = [self.input, self.output, self.errors]
        if len(set(paths)) < 3 or not all(Path(path).is_absolute() for path in paths):
            raise InvalidRequest("input, output and errors must be three different absolute paths", field="output")

    def request_id(self, number: int, attempt: int) -> str:
        """The id for line ``number``; the same in every run of the job, so that what is running or done is found again."""
        return f"{self.job_id}.{number}" if attempt == 0 else f"{self.job_id}.{number}.{attempt}"

    def line_number(self, request_id: str) -> int | None:
        """The line that `request_id` was made for; None if it is not of this job."""
        job_id, _, rest = request_id.partition(".")
        number = rest.partition(".")[0]
        return int(number) if job_id == self.job_id and number.isdecimal() else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BulkSpec:
        """What `to_json` gave; fields of a newer version are ignored."""
        return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})
