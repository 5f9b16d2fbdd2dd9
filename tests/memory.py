"""What is still held in memory."""

from __future__ import annotations

import gc


def num_alive(kind: type) -> int:
    """Objects of exactly this kind that something refers to."""
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())
