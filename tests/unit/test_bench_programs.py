"""The programs of ops/bench and the page about them."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ops.bench import growth, scheduler_cost
from producer.load.plots import draw
from tests.tiny_engine import tiny_engine
from worker.bench.cli import bench

FOLDER = Path(__file__).parents[2] / "ops" / "bench"
PAGE = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^    ((?:headrace bench|python -m) .*)$", PAGE, re.MULTILINE)
GPU_PAGE = (FOLDER / "GPU.md").read_text()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("headrace bench")])
def test_commands_of_the_page_are_understood(command: str) -> None:
    arguments = [sys.executable if word.endswith("bin/python") else word for word in shlex.split(command)[2:]]
    bench.make_context("bench", arguments)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("python -m")])
def test_programs_of_the_page_have_the_options_it_gives_them(command: str) -> None:
    module, *arguments = shlex.split(command)[2:]
    text = Path(FOLDER.parents[1], *module.split(".")).with_suffix(".py").read_text()
    assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in text] == []


@pytest.mark.parametrize("arguments", re.findall(r"python3 -m worker\.bench\.cli (.*)", GPU_PAGE))
def test_benchmarks_of_the_gpu_page_are_understood(arguments: str) -> None:
    bench.make_context("bench", shlex.split(arguments))


@pytest.mark.parametrize(("program", "arguments"), re.findall(r"python3 -m ops\.bench\.(\w+) (.*)", GPU_PAGE))
def test_programs_of_the_gpu_page_have_the_options_it_gives_them(program: str, arguments: str) -> None:
    text = (FOLDER / f"{program}.py").read_text()
    assert [word for word in shlex.split(arguments) if word.startswith("--") and f'"{word}"' not in text] == []


def test_tests_of_the_gpu_page_are_there() -> None:
    named = set(re.findall(r"tests/gpu/\w+\.py", GPU_PAGE))
    assert {str(path.relative_to(FOLDER.parents[1])) for path in FOLDER.parents[1].glob("tests/gpu/test_*.py")} == named


def test_every_program_is_on_the_page() -> None:
    programs = [path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert [program for program in programs if f"python -m ops.bench.{program}" not in PAGE] == []


@pytest.fixture(scope="module")
def measured() -> growth.Growth:
    """Of a model whose context is shorter than the last two of the contexts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "BATCHES", (1, 4))
        patch.setattr(growth, "BATCH_TOKENS", 64)
        patch.setattr(growth, "SCHEDULER_STEPS", 3)
        patch.setattr(scheduler_cost, "WAITING", (10, 100))
        return growth.measure(tiny_engine())


def test_growth_has_a_point_for_each_size_that_fits(measured: growth.Growth) -> None:
    assert [(point.batch, point.context) for point in measured.batches] == [(1, growth.PROMPT_TOKENS), (4, growth.PROMPT_TOKENS)]
    assert [point.context for point in measured.contexts] == [128]
    assert [row.waiting for row in measured.waiting] == [10, 100]
    assert all(point.step_ms > 0 for point in (*measured.batches, *measured.contexts))


def test_growth_leaves_the_engine_empty() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "BATCH_TOKENS", 64)
        growth.time_decodes(engine, batch=3, context=40)
    assert not engine.has_work()
    assert engine.stats().used_blocks == 0


def test_growth_is_shown_and_drawn(measured: growth.Growth, tmp_path: Path) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(*growth.tables(measured))
    text = console.export_text()
    assert "longer than the model's context: 1024, 4096" in " ".join(text.split())
    draw("growth", growth.panels(measured), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(growth.to_json(measured)))["batches"][0]["tokens_per_s"] == measured.batches[0].tokens_per_s


@pytest.fixture
def gpu_attention() -> Any:
    pytest.importorskip("triton")
    from ops.bench import gpu_attention

    return gpu_attention


def test_an_attention_kernel_that_fails_is_timed_as_failed(gpu_attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> object:
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setattr(gpu_attention, "_captured", lambda run: run)
    monkeypatch.setattr(gpu_attention, "_median_ms", lambda run: run() or 0.5)
    assert gpu_attention.timed(lambda: lambda: None) == (0.5, "")
    for make in (fails, lambda: fails):
        assert gpu_attention.timed(make) == (None, "RuntimeError: no kernel")
    row = gpu_attention.Row("llama-8b", "1 decode at 1k", "other", None, 0.1, "RuntimeError: no kernel")
    assert str(row).endswith("RuntimeError: no kernel")


def test_the_sweep_varies_the_rows_of_chunks_only_if_there_are_chunks(gpu_attention: Any) -> None:
    assert len(gpu_attention.swept_tiles(has_chunks=True)) == 3 * len(gpu_attention.swept_tiles(has_chunks=False))
    assert all("prefill_rows" not in tiles for tiles in gpu_attention.swept_tiles(has_chunks=False))
