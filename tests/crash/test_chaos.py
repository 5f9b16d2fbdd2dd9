from __future__ import annotations

from dataclasses import asdict

import pytest

from ops.bench.chaos import parse, run


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--fsync", "always"], ["--fsync", "everysec"], ["--max-batch-size", "4", "--fetch-ahead", "50"]])
def test_books_balance_after_a_short_run_of_chaos(server_kind: str, options: list[str]) -> None:
    report = run(parse(["--server", server_kind, "--seconds", "30", "--callers", "16", "--seed", "11", *options]))
    assert report.failures == [], asdict(report)
    assert report.accepted == report.answered > 50
    assert report.generated_twice is not None
    assert report.generated_twice < report.tokens / 4
