"""The folder of reports: one JSON file and one PNG per test, and one self-contained HTML page with all of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from producer.load.plots import draw
from producer.load.report import Cell, Report, text_of

PAGE = "index.html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td.text { text-align: left; }
ul { list-style: none; padding: 0; }
.pass::before { content: "PASS "; color: #187a2f; font-weight: 600; }
.fail::before { content: "FAIL "; color: #b3261e; font-weight: 600; }
img { max-width: 100%; }
"""


def write(report: Report, folder: Path) -> Path:
    """Add a report to ``folder`` (replacing an earlier one of the same test) and write its page again; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{report.test}.json").write_text(json.dumps(report.to_json(), indent=2))
    if report.panels:
        draw(f"{report.test}: {report.about}", report.panels, folder / f"{report.test}.png")
    page = folder / PAGE
    page.write_text(_page(folder))
    return page


def _page(folder: Path) -> str:
    sections = "\n".join(line for path in sorted(folder.glob("*.json")) for line in _section(path))
    head = f'<meta charset="utf-8"><title>Headrace load tests</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n<h1>Headrace load tests</h1>\n{sections}\n</body></html>\n'


def _section(path: Path) -> Iterator[str]:
    """A report's part of the page; nothing for a file that is not one of our reports."""
    said = _report(path)
    if said is None:
        return
    yield f"<h2>{escape(said['test'])}</h2>\n<p>{escape(said['about'])}</p>"
    yield "<ul>" + "".join(_check(check) for check in said["checks"]) + "</ul>"
    if said["summary"]:
        yield f"<p><strong>{escape(said['summary'])}</strong></p>"
    picture = path.with_suffix(".png")
    if said["panels"] and picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        yield f'<img alt="{escape(said["test"])}" src="data:image/png;base64,{data}">'
    yield "<table><tr>" + "".join(f"<th>{escape(column)}</th>" for column in said["columns"]) + "</tr>"
    for row in said["rows"]:
        yield "<tr>" + "".join(_cell(cell) for cell in row) + "</tr>"
    yield "</table>"


def _report(path: Path) -> Mapping[str, Any] | None:
    try:
        said = json.loads(path.read_bytes())
    except ValueError:
        return None
    return said if isinstance(said, dict) and {field.name for field in fields(Report)} <= said.keys() else None


def _cell(cell: Cell) -> str:
    return f"<td{' class=text' if isinstance(cell, str) else ''}>{escape(text_of(cell))}</td>"


def _check(check: Mapping[str, Any]) -> str:
    return f'<li class="{"pass" if check["ok"] else "fail"}">{escape(check["name"])}: {escape(check["detail"])}</li>'
