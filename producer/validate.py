"""Checks of single values; each returns the checked value or raises `InvalidRequest` naming the field.

Messages give the field, the value's type and the limit, never the value itself if it may be
user text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from producer.errors import InvalidRequest

MAX_DEPTH = 64
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


def invalid(field: str, must_be: str) -> InvalidRequest:
    """The error for ``field``; ``must_be`` says what it has to be."""
    return InvalidRequest(f"{field} must be {must_be}", field=field)


def integer(field: str, value: object, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """An int (not a bool) within ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(field, f"an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise invalid(field, f"between {low} and {high}")
    return value


def number(field: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite int or float within ``low..high``, as float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(field, f"a number, not {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:
        raise invalid(field, "a finite number") from None
    if not math.isfinite(result):
        raise invalid(field, "a finite number")
    if not low <= result <= high:
        raise invalid(field, f"between {low:g} and {high:g}")
    return result


def boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(field, f"true or false, not {type(value).__name__}")
    return value


def text(field: str, value: object, max_bytes: int, *, allow_empty: bool = False) -> str:
    """A str that UTF-8 can carry (no lone surrogates), without NUL, of at most ``max_bytes`` bytes."""
    if not isinstance(value, str):
        raise invalid(field, f"a string, not {type(value).__name__}")
    if not value and not allow_empty:
        raise invalid(field, "a non-empty string")
    if "\0" in value:
        raise invalid(field, "free of NUL characters")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise invalid(field, "valid Unicode (it holds a lone surrogate)") from None
    if size > max_bytes:
        raise invalid(field, f"at most {max_bytes} bytes (got {size})")
    return value


def sequence(field: str, value: object, max_items: int) -> Sequence[object]:
    """A list or tuple of at most ``max_items``."""
    if not isinstance(value, list | tuple):
        raise invalid(field, f"a list, not {type(value).__name__}")
    if len(value) > max_items:
        raise invalid(field, f"a list of at most {max_items} items (got {len(value)})")
    return value


def token_ids(field: str, value: object, max_items: int) -> list[int]:
    """A list of token ids; whether they are in the vocabulary is checked at the worker."""
    items = sequence(field, value, max_items)
    for i, item in enumerate(items):
        if type(item) is not int or not 0 <= item <= 2**31 - 1:
            integer(f"{field}[{i}]", item, 0, 2**31 - 1)
    return [item for item in items if isinstance(item, int)]


def tree(field: str, value: object, max_bytes: int) -> None:
    """Maps with string keys, lists, and plain scalars, at most `MAX_DEPTH` deep; every string is `text` of ``max_bytes``."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise invalid(field, f"at most {MAX_DEPTH} levels deep")
        if isinstance(item, Mapping):
            for key in item:
                text(f"{field} key", key, max_bytes, allow_empty=True)
            stack += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list | tuple):
            stack += [(child, depth + 1) for child in item]
        else:
            _scalar(field, item, max_bytes)


def _scalar(field: str, value: object, max_bytes: int) -> None:
    if isinstance(value, str):
        text(field, value, max_bytes, allow_empty=True)
    elif isinstance(value, float):
        number(field, value)
    elif value is not None and not isinstance(value, bool):
        integer(field, value)
