"""What a load test found: figures as a table, checks that pass or fail, and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # its module needs redis; benchmarks, which use this one, do not
    from producer.load.callers import LoadCall

Cell = str | float
Scale = Literal["linear", "log"]
Style = Literal["line", "step", "dots", "bars"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; ``detail`` says what was found."""

    name: str
    ok: bool
    detail: str

    @property
    def line(self) -> str:
        return f"{'PASS' if self.ok else 'FAIL'}  {self.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Series:
    """One series of values.

    Attributes:
        label: in the legend; an empty one is not shown.
        x: names if ``style`` is ``bars``.
        color: which of the colours; None takes the next one.
        dash: which of the line styles; 0 is solid.
    """

    label: str
    x: Sequence[Cell]
    y: Sequence[float]
    style: Style = "line"
    color: int | None = None
    dash: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        goals: horizontal lines by label.
        marks: vertical lines by label.
        x_scale: ``steps`` is also logarithmic, with a tick at each value.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    goals: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    x_scale: Scale | Literal["steps"] = "linear"
    y_scale: Scale = "linear"


@dataclass(frozen=True, slots=True)
class Report:
    """One test's findings.

    Attributes:
        about: what was run, in one sentence.
        summary: the finding in one sentence, if there is one.
    """

    test: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    checks: Sequence[Check]
    panels: Sequence[Panel] = ()
    summary: str = ""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def render(self) -> Group:
        """For a terminal."""
        table = Table()
        for column, cell in zip(self.columns, self.rows[0], strict=True):
            table.add_column(column, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(text_of(cell)) for cell in row))
        lines = [Text(check.line, style="green" if check.ok else "bold red") for check in self.checks]
        return Group(
            Text(f"{self.test}: {self.about}", style="italic"), table, *lines, *([Text(self.summary, style="bold")] if self.summary else [])
        )


def text_of(cell: Cell) -> str:
    """A cell for reading: numbers have three significant figures."""
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if cell == int(cell) or abs(cell) >= 100 else f"{cell:.3g}"


def distribution(label: str, values: Sequence[float]) -> Series:
    """The share of ``values`` up to each of them."""
    ordered = sorted(values)
    return Series(label, [*ordered[:1], *ordered], [i / len(ordered) for i in range(len(ordered) + 1)] if ordered else [], "step")


def all_answered(calls: Sequence[LoadCall]) -> Check:
    """Whether each call was answered in full."""
    codes = Counter(call.code for call in calls if call.code)
    failed = ", ".join(f"{count} {code}" for code, count in codes.most_common())
    detail = f"{len(calls) - codes.total()} of {len(calls)}"
    return Check("every request is answered", bool(calls) and not codes, f"{detail} ({failed})" if failed else detail)
