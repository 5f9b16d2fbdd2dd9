"""``headrace bench`` with real engines, each in a process of its own, on the real model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.bench import random_model
from tests.tiny_models import tiny_model
from worker.bench import cli

FEW = ("--workload", "decode", "--count", "2", "--output-cap", "2", "--output-cap", "3", "--rounds", "2", "--dtype", "float32")
SMALL = ("--workload", "shared-prefix", "--count", "2", "--output-cap", "2", "--rounds", "1", "--kv-memory", "16MiB")


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


@contextmanager
def benching(model: Path, *engines: str) -> Iterator[subprocess.Popen[str]]:
    """A benchmark of more rounds than the test waits for."""
    command = [sys.executable, "-m", "worker.bench.cli", "--model", str(model), "--workload", "shared-prefix", "--count", "2"]
    options = ["--output-cap", "2", "--rounds", "100000", "--kv-memory", "16MiB", "--json"]
    named = [word for engine in engines for word in ("--engine", engine)]
    with subprocess.Popen([*command, *options, *named], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def await_rounds(process: subprocess.Popen[str], engine: str, count: int) -> None:
    """Wait until stderr says that an engine has done so many rounds."""
    assert process.stderr is not None
    seen: list[str] = []
    while sum(line.startswith(f"{engine}, ") for line in seen) < count:
        seen.append(process.stderr.readline())
        assert seen[-1], "".join(seen)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `ops.bench.random_model` writes it, but smaller."""
    folder = tmp_path_factory.mktemp("models") / "random-llama"
    small = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    random_model.write_model(folder, {**random_model.SHAPES["smollm2-135m"], **small, **heads})
    return folder


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_shows_its_rounds_and_leaves_nothing_behind(random_llama: Path, sent: signal.Signals) -> None:
    with benching(random_llama, "headrace", "queue", "naive") as process:
        await_rounds(process, "naive", 2)
        started = descendants(process.pid)
        assert len(started) >= 5, "three drivers, Valkey and a worker"
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr.splitlines()[-1]) == (130, "Error: interrupted")
    assert "Traceback" not in stderr
    found = json.loads(stdout)
    assert found["ended_by"] == "interrupted"
    (scenario,) = found["scenarios"]
    assert all(len(scenario["engines"][engine]["rounds"]) >= 2 for engine in ("headrace", "queue", "naive"))
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_an_engine_that_ends_is_named_beside_what_was_measured(random_llama: Path) -> None:
    with benching(random_llama, "headrace", "naive") as process:
        await_rounds(process, "naive", 1)
        _, naive = descendants(process.pid)[:2]
        os.kill(naive, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr.splitlines()[-1]) == (1, "Error: engine naive ended with exit code -9")
    found = json.loads(stdout)
    assert found["ended_by"] == "engine naive ended with exit code -9"
    assert found["scenarios"][0]["engines"]["naive"]["rounds"]


def test_kernels_are_told_by_the_engine_and_through_the_queue(random_llama: Path) -> None:
    done = CliRunner().invoke(cli.bench, ["--model", str(random_llama), *SMALL, "--engine", "headrace", "--engine", "queue", "--json"])
    assert done.exit_code == 0, done.stderr
    engines = json.loads(done.stdout)["scenarios"][0]["engines"]
    assert engines["headrace"]["kernels"] == engines["queue"]["kernels"] != ""
