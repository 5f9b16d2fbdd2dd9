"""JSON on stdout."""

from __future__ import annotations

import codecs
import json
import sys
from typing import Any

import click


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print ``value`` as JSON and flush it; in ASCII unless stdout is UTF-8, because Python's escapes for the rest are not JSON's."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    click.echo(json.dumps(value, ensure_ascii=not is_utf8, indent=indent))
