"""What the options of ``headrace worker`` become."""

import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from producer.cli import main
from worker.config import WorkerConfig
from worker.engine.config import EngineConfig
from worker.routing import Route
from worker.service import serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that the service is started with."""
    options: dict[str, Any] = {}
    monkeypatch.setattr("worker.service.serve", lambda **given: options.update(given) or 0)
    return options


def run(*args: str, environment: dict[str, str] | None = None) -> str:
    return CliRunner().invoke(main, ["worker", *args], env=environment).output


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("17", 17)])
def test_sizes_have_units(text: str, size: int, served: dict[str, Any]) -> None:
    run("--kv-memory", text)
    assert served["kv_memory_bytes"] == size


def test_weights_and_routes_may_be_repeated(served: dict[str, Any]) -> None:
    run("--source-weight", "gold=2", "--source-weight", "a=b=0.5", "--route", "batch:source=nightly-*")
    assert served["source_weights"] == {"gold": 2.0, "a=b": 0.5}
    assert served["routes"] == (Route("batch", (("source", "nightly-*"),)),)


def test_options_come_from_the_environment(served: dict[str, Any]) -> None:
    run(environment={"HEADRACE_WORKER_SOURCE_WEIGHT": "gold=2 iron=0.5", "HEADRACE_WORKER_KV_MEMORY": "1GiB"})
    assert served["source_weights"] == {"gold": 2.0, "iron": 0.5}
    assert served["kv_memory_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("config", "of_code_alone"), [(EngineConfig(), {"cuda_graphs", "run_ahead"}), (WorkerConfig(name="w"), {"socket_timeout_s"})]
)
def test_every_setting_has_an_option_with_its_default(
    config: EngineConfig | WorkerConfig, of_code_alone: set[str], served: dict[str, Any]
) -> None:
    run("--name", "w")
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in of_code_alone}
    assert {name: served[name] for name in settings} == settings
    assert not of_code_alone & served.keys()


@pytest.mark.parametrize("name", ["lease", "max_batch", "log_prompt"])
def test_option_that_no_configuration_has_is_refused(name: str, served: dict[str, Any]) -> None:
    run()
    with pytest.raises(TypeError, match=f"unknown options of a worker: {name}$"):
        serve(**served, **{name: 1})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--kv-memory", "much", "such as 2GiB or 500MB"),
        ("--source-weight", "gold=heavy", "WEIGHT a number"),
        ("--route", "batch:colour=red", "labels of source, user, task"),
    ],
)
def test_what_cannot_be_read_is_explained(option: str, value: str, message: str, served: dict[str, Any]) -> None:
    assert message in " ".join(run(option, value).split())
    assert served == {}


def failure(*args: str) -> str:
    """The message of a worker that does not start."""
    done = subprocess.run([sys.executable, "-m", "worker.cli", "worker", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_port_that_is_taken_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104  # the pages are served there, too
        port = taken.getsockname()[1]
        assert f"Error: metrics_port {port} cannot be listened on: Address already in use\n" in failure("--metrics-port", str(port))


def test_step_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert "Error: step_log cannot be written: No such file or directory\n" in failure("--step-log", str(tmp_path / "missing" / "steps"))
