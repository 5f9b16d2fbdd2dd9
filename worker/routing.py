"""The tier in which a request runs: its stream's, unless a rule of the worker says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from producer.keys import Tier, check_tier
from producer.wire import GenerateRequest

LABELS = ("source", "user", "task")


@dataclass(frozen=True, slots=True)
class Route:
    """Requests whose labels all match go to ``tier``; patterns are shell patterns (``nightly-*``)."""

    tier: Tier
    patterns: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read ``TIER:LABEL=PATTERN[,LABEL=PATTERN...]``, for example ``batch:source=nightly-*,task=eval``.

        Raises:
            ValueError: it is not of that form.
        """
        tier, _, conditions = text.partition(":")
        patterns = tuple((label, pattern) for label, _, pattern in (part.partition("=") for part in conditions.split(",")))
        if not all(label in LABELS and pattern for label, pattern in patterns):
            raise ValueError(f"a route is TIER:LABEL=PATTERN[,LABEL=PATTERN...] with labels of {', '.join(LABELS)}")
        return cls(check_tier(tier), patterns)

    def matches(self, wire_request: GenerateRequest) -> bool:
        return all(fnmatchcase(getattr(wire_request, label), pattern) for label, pattern in self.patterns)


def tier_of(wire_request: GenerateRequest, routes: Sequence[Route]) -> Tier:
    """The tier of the first route that matches, else the stream's."""
    return next((route.tier for route in routes if route.matches(wire_request)), wire_request.tier)
