"""``headrace bench`` with real engines, each in a process of its own, on the real model."""

import json
from pathlib import Path

from click.testing import CliRunner

from tests.tiny_models import tiny_model
from worker.bench import cli

FEW = ("--workload", "decode", "--count", "2", "--output-cap", "2", "--output-cap", "3", "--rounds", "2", "--dtype", "float32")


def test_engines_are_compared_on_the_real_model(tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    done = CliRunner().invoke(cli.bench, [*FEW, "--engine", "queue", "--engine", "naive", "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [scenario["output_tokens"] for scenario in found["scenarios"]] == [4, 6]
    for scenario in found["scenarios"]:
        queue, naive = (scenario["engines"][name]["median"] for name in ("queue", "naive"))
        assert {"kv_usage_peak", "idle_share", "batch_size_mean", "ttft_ms_p99"} <= queue.keys()
        assert "itl_ms_p99" not in queue, "its callers block"
        assert "kv_usage_peak" not in naive
        assert queue["ratio"] == 1.0
    order = [line.split(":")[0] for line in done.stderr.splitlines() if "output tok/s" in line]
    assert order == ["queue, outputs ≤ 2", "naive, outputs ≤ 2", "queue, outputs ≤ 3", "naive, outputs ≤ 3"] * 2
    assert picture.exists()


def test_an_engine_that_cannot_start_is_named(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)  # and no weights
    done = CliRunner().invoke(cli.bench, ["--model", str(tmp_path), "--workload", "shared-prefix"])
    assert done.exit_code == 1
    assert "engine headrace ended with exit code 1" in done.stderr
