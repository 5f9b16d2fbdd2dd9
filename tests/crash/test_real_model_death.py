"""A crash with the real model: what was generated is kept, and the rest equals an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from producer import Client
from tests.servers import Server
from tests.workers import QueueView, WorkerProcess, eventually

OPTIONS = ("--model", "demo", "--dtype", "float32", "--lease", 2, "--log-level", "warning", "--max-batch-size", 16)
PROMPTS = ("The capital of France is", "Once upon a time there was a mill")


def worker(server: Server, queue: str, log: Path, *options: object) -> WorkerProcess:
    return WorkerProcess(server.url, queue, *OPTIONS, *options, module=("worker.cli", "worker"), log=log)


@pytest.mark.slow
def test_greedy_and_seeded_text_is_that_of_an_undisturbed_run(server: Server, queue: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}]
    items = [{"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **setting} for prompt in PROMPTS for setting in settings]
    with server.client() as raw, Client(server.url, queue=queue) as client:
        view = QueueView(raw, queue)
        with worker(server, queue, log) as victim:
            eventually(lambda: "running" in {said["state"] for said in view.workers().values()}, "running", timeout_s=120)
            undisturbed = [handle.result(timeout=120) for handle in client.submit_many(items)]  # type: ignore[arg-type]  # maps of options
            handles = client.submit_many([{**item, "stream": True} for item in items])  # type: ignore[arg-type]
            eventually(lambda: all(len(view.frames(handle.id)) >= 10 for handle in handles), "all under way")
            victim.signal(signal.SIGKILL)
            victim.wait()
        with worker(server, queue, log):
            results = [handle.result(timeout=120) for handle in handles]
        assert [result.token_ids for result in results] == [result.token_ids for result in undisturbed]
        assert [result.text for result in results] == [result.text for result in undisturbed]
        assert {result.attempt for result in results} == {2}
        for handle, result in zip(handles, results, strict=True):
            assert "".join(chunk.text for chunk in client.get(handle.id).stream(timeout=10)) == result.text
        view.assert_clean()


@pytest.mark.slow
def test_worker_told_to_go_while_it_loads_its_model_ends_in_order(server: Server, queue: str, tmp_path: Path) -> None:
    with server.client() as raw, worker(server, queue, tmp_path / "log") as loading:
        view = QueueView(raw, queue)
        eventually(lambda: "starting" in {said["state"] for said in view.workers().values()}, "starting", timeout_s=60)
        assert loading.drain() == 0, (tmp_path / "log").read_text()
        assert view.workers() == {}
