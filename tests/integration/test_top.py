from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner
from rich.console import Console

from producer.cli.group import main
from producer.dead import DeadLetter
from producer.status import QueueStatus, TierStatus, WorkerStatus
from producer.top import HISTORY, Frame, View, read_frame, sparkline
from tests.servers import Server
from tests.workers import QueueView, worker_thread

SAID = {"requests_done": "80", "cached_blocks": "20", "waiting": "9", "max_batch_size": "100"}
WORKER = WorkerStatus("gpu-0", "running", "m", 40, 30, 100, 1290.6, 75.0, SAID)
STATUS = QueueStatus("default", [TierStatus("realtime", 7, 3, 4.2), TierStatus("batch", 0, 0, None)], [WORKER], 0)
LETTER = DeadLetter("1-0", {b"id": b"r1"}, "batch", "POISONED", "given up [not markup]", 3, "gpu-9", 0, [])


def text_of(view: View, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    with console.file:
        console.print(view.render())
        return console.export_text()


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([0, 0], "▁▁"), ([0, 7], "▁█"), ([1, 2, 3, 4, 5, 6, 7], "▂▃▄▅▆▇█"), ([5], "█")],
)
def test_sparkline_is_scaled_from_zero_to_its_highest(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_screen_shows_tiers_workers_and_how_full_they_are() -> None:
    view = View()
    view.show(Frame(STATUS, []))
    lines = [" ".join(line.split()) for line in text_of(view).splitlines()]
    assert lines[0].startswith("headrace default")
    assert "1 worker 1,291 tokens/s" in lines[0]
    assert "realtime 7 █ 7 3 4.2s" in lines
    assert "batch 0 ▁ 0 0" in lines
    (worker,) = [line for line in lines if line.startswith("gpu-0")]
    assert worker.startswith("gpu-0 running m 40/100 █ 9 ")
    assert worker.endswith("50% 1,291 80 1m15s")
    assert not any("dead" in line for line in lines)


@pytest.mark.parametrize(
    ("size", "said", "batch"), [(3, {"max_batch_size": "8"}, "3/8"), (3, {}, "3"), (3, {"max_batch_size": ""}, "3"), (None, {}, "")]
)
def test_batch_is_shown_of_how_many_where_the_worker_says(size: int | None, said: dict[str, str], batch: str) -> None:
    assert replace(WORKER, batch_size=size, fields=said).batch == batch


def test_narrow_screen_keeps_the_numbers_and_the_latest_of_the_courses() -> None:
    view = View()
    model = replace(WORKER, name="a-host-4711-9f2a", model="a-model-with-a-long-name")
    for i in range(HISTORY):
        tiers = [replace(STATUS.tiers[0], queued=int(i == HISTORY - 1)), *STATUS.tiers[1:]]
        view.show(Frame(replace(STATUS, tiers=tiers, workers=[model]), []))
    lines = text_of(view, width=80).splitlines()
    assert max(map(len, lines)) == 80
    [realtime] = [line.split() for line in lines if line.startswith("realtime")]
    assert realtime[2].endswith("▁▁█")
    [worker] = [line.split() for line in lines if line.startswith("a-host-4711-9f2a ")]
    assert worker[-4:] == ["50%", "1,291", "80", "1m15s"]


def test_courses_are_bounded_and_forget_workers_that_are_gone() -> None:
    view = View()
    for i in range(3 * HISTORY):
        view.show(Frame(replace(STATUS, workers=[replace(WORKER, name=f"gpu-{i}")]), []))
    assert {name: len(course) for name, course in view._courses.items()} == {
        "tokens": HISTORY,
        "queued realtime": HISTORY,
        "queued batch": HISTORY,
        f"batch gpu-{3 * HISTORY - 1}": 1,
    }


def test_a_worker_that_says_little_and_no_worker_at_all_are_shown() -> None:
    view = View()
    view.show(Frame(replace(STATUS, workers=[WorkerStatus("old", "", "", None, None, None, None, None)]), []))
    assert "old" in text_of(view)
    view.show(Frame(replace(STATUS, workers=[]), []))
    assert "no live worker" in text_of(view)


def test_last_errors_of_workers_are_shown_the_latest_first() -> None:
    def failed(name: str, ms: int) -> WorkerStatus:
        return replace(WORKER, name=name, fields={"last_error": "OUT_OF_MEMORY", "last_error_ms": str(ms)})

    view, now_ms = View(), int(time.time() * 1000)
    view.show(Frame(replace(STATUS, workers=[failed("gpu-0", 86_400_000), failed("gpu-1", now_ms), WORKER]), []))
    lines = [line.split() for line in text_of(view).splitlines() if "OUT_OF_MEMORY" in line]
    assert [line[-2:] for line in lines] == [["OUT_OF_MEMORY", "gpu-1"], ["OUT_OF_MEMORY", "gpu-0"]]
    assert lines[1][0].startswith("1970-01-0")


def test_dead_letters_are_shown_as_they_are() -> None:
    view = View()
    view.show(Frame(replace(STATUS, dead=12), [LETTER]))
    text = text_of(view)
    assert "12 dead letters" in text
    assert "given up [not markup]" in text


def test_trouble_keeps_the_last_screen_and_says_so() -> None:
    view = View()
    view.trouble = "Redis is unavailable (no route)"
    assert text_of(view).strip() == "Redis is unavailable (no route)"
    view.show(Frame(STATUS, []))
    view.trouble = "Redis is unavailable (no route)"
    assert "Redis is unavailable (no route); this is what was last seen" in text_of(view)
    assert "gpu-0" in text_of(view)


def test_frame_of_a_real_queue_has_its_worker(server: Server, queue: str) -> None:
    with server.client() as raw, worker_thread(server.url, queue) as worker:
        QueueView(raw, queue).await_running()
        frame = read_frame(raw, queue)
    assert [(item.name, item.state) for item in frame.status.workers] == [(worker.config.name, "running")]
    assert frame.letters == []


def test_command_ends_after_so_many_looks_and_leaves_a_picture(server: Server, queue: str, tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    with server.client() as raw, worker_thread(server.url, queue) as worker:
        QueueView(raw, queue).await_running()
        options = ["--redis", server.url, "--queue", queue, "--interval", "0.1", "--count", "3", "--svg", str(picture)]
        result = CliRunner().invoke(main, ["top", *options])
    assert result.exit_code == 0, result.output
    assert queue in result.output
    words = [text.text or "" for text in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 - ours
    assert {queue, worker.config.name, "running"} <= {word.strip() for word in words}
    assert any("▁▁▁" in word for word in words)  # a course of three looks


def test_picture_that_cannot_be_written_is_told_before_the_first_look(server: Server, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", "--redis", server.url, "--count", "1", "--svg", str(tmp_path / "none" / "top.svg")])
    assert result.exit_code == 2
    assert "top.svg" in result.output


def test_command_that_fails_leaves_the_picture_of_before(tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    picture.write_text("of before")
    result = CliRunner().invoke(main, ["top", "--redis", "nonsense://", "--count", "1", "--svg", str(picture)])
    assert result.exit_code == 2
    assert picture.read_text() == "of before"


def test_command_draws_on_a_terminal_and_ends_with_ctrl_c(server: Server, queue: str, tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", "from producer.cli import main; main()", "top", "--redis", server.url, "--queue", queue]
    command += ["--svg", str(picture)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | {"TERM": "xterm-256color"})
    os.close(terminal)
    try:
        assert b"no live worker" in read_until(controller, b"no live worker")
        process.send_signal(signal.SIGINT)
        read_until(controller, b"\x1b[?1049l")  # back from the alternate screen
        assert process.wait(20) == 130
        assert "no&#160;live&#160;worker" in picture.read_text()
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    seen, deadline_s = b"", time.monotonic() + 30
    while wanted not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"not drawn: {wanted!r} in {seen!r}"
        seen += os.read(descriptor, 65536)
    return seen
