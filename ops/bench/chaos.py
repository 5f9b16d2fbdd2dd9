"""Callers, workers and a server, with every fault that can be injected; afterwards the results are checked.

    python -m ops.bench.chaos [--engine fake|real] [--server valkey|redis8|redis7] [--seconds 120] [--seed 1] [--json]

Workers are killed, drained and stopped for longer than their lease, the server is killed and restarted, and both sides'
connections to it are cut, delayed and silenced, or lose replies. At the end every accepted request must have been
answered exactly once; the streamed text must equal the final reply, and both must equal an undisturbed run; and
nothing may be left in queue or KV cache. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ops.bench.chaos_faults import FAULTS, Faults, Supervisor, proxied
from ops.bench.chaos_load import Call, Load, references
from tests.servers import KINDS, Server
from tests.workers import QueueView, WorkerProcess, eventually

SETTLE_S = 900.0
START_S = 300.0
CHECKPOINT_TOKENS = 16
QUEUE = "chaos"


@dataclass
class Report:
    """What happened, and what was found to be wrong.

    Attributes:
        attempts: number of results by attempt.
        generated_twice: tokens that were computed again; None if the engine does not report it.
        faults: the injected faults, by kind.
        failures: what Headrace did wrong.
    """

    engine: str
    server: str
    seed: int
    seconds: float = 0.0
    requests: int = 0
    accepted: int = 0
    answered: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    tokens: int = 0
    generated_twice: int | None = None
    workers_started: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Chaos:
    """One run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.trace = folder / "trace"
        self.report = Report(args.engine, args.server, args.seed)

    def run(self) -> Report:
        args = self.args
        with ExitStack() as stack:
            server = stack.enter_context(Server(args.server, appendonly="yes", appendfsync=args.fsync))
            workers_side, callers_side = proxied(stack, server), proxied(stack, server)
            view = QueueView(stack.enter_context(server.client()), QUEUE)
            supervisor = Supervisor(lambda log: self._launch(workers_side.url, log), args.workers, self.folder)
            stack.callback(supervisor.kill)
            _await_workers(view, args.workers)
            truth = references(server.url, QUEUE, args.max_tokens)
            load = Load(callers_side.url, QUEUE, truth, count=args.callers, max_tokens=args.max_tokens, seed=args.seed)
            faults = Faults(
                server,
                supervisor,
                workers_side,
                callers_side,
                num_workers=args.workers,
                lease_s=args.lease,
                pause_s=args.pause or (2.0 if args.engine == "fake" else 20.0),
                names=args.faults,
                chance=random.Random(args.seed),
            )
            started_s = time.monotonic()
            faults.run(args.seconds)
            self._settle(load, view)
            self.report.seconds = round(time.monotonic() - started_s, 1)
            self.report.faults = dict(faults.counts)
            self._audit(load.calls, view)
            self._check("a worker did not end in order", set(supervisor.stop()) == {0})
            self.report.workers_started = supervisor.num_started
        return self.report

    def _launch(self, url: str, log: Path) -> WorkerProcess:
        args = self.args
        common = ["--lease", args.lease, "--drain-seconds", 0.3, "--checkpoint-tokens", CHECKPOINT_TOKENS, "--checkpoint-seconds", 0.5]
        common += ["--max-batch-size", args.max_batch_size, "--fetch-ahead", args.fetch_ahead]
        if args.engine == "fake":
            options = [*common, "--max-attempts", 50, "--socket-timeout", 2, "--step-ms", args.step_ms, "--trace", self.trace]
            return WorkerProcess(url, QUEUE, *options, log=log)
        options = [*common, "--max-attempts", 50, "--model", args.model, "--dtype", "float32", "--log-format", "json"]
        return WorkerProcess(url, QUEUE, *options, module=("worker.cli", "worker"), log=log)

    def _settle(self, load: Load, view: QueueView) -> None:
        self._check("some callers got no answer in time", load.stop(SETTLE_S))
        _await_workers(view, self.args.workers)
        try:
            eventually(lambda: view.length() == 0 and _idle(view), "the queue is empty", SETTLE_S)
        except AssertionError:
            self.report.failures.append(f"left over: {view.length()} entries, workers {view.workers()}")

    def _audit(self, calls: list[Call], view: QueueView) -> None:
        report = self.report
        accepted = [call for call in calls if call.accepted]
        finals = {call.id: view.finals(call.id) for call in accepted}
        report.requests, report.accepted = len(calls), len(accepted)
        report.answered = sum(count == 1 for count in finals.values())
        report.outcomes = dict(Counter(f"{call.manner}: {call.outcome or 'none'}" for call in calls))
        report.attempts = dict(sorted(Counter(call.attempt for call in calls if call.attempt).items()))
        report.slowest_s = round(max((call.seconds for call in calls), default=0.0), 1)
        for call_id, count in finals.items():
            self._check(f"{call_id} has {count} final replies", count == 1)
        for call in calls:
            allowed = {"ok", "CANCELLED"} if call.manner == "cancel" else {"", "CANCELLED"} if call.manner == "abandon" else {"ok"}
            self._check(f"{call.id} ({call.manner}) ended with {call.outcome or 'nothing'}", call.outcome in allowed)
            report.failures += [f"{call.id}: {fault}" for fault in call.faults]
        self._audit_rest(view)

    def _audit_rest(self, view: QueueView) -> None:
        try:
            view.assert_clean()
        except AssertionError as error:
            self.report.failures.append(f"not clean: {error}")
        for name, said in view.workers().items():
            free, cached, total = (int(said[name]) for name in ("free_blocks", "cached_blocks", "total_blocks"))
            self._check(f"{name} has leaked {total - free - cached} blocks", free + cached == total)
        if self.trace.exists():
            steps = Counter(self.trace.read_text().splitlines())
            self.report.tokens = len(steps)
            self.report.generated_twice = sum(steps.values()) - len(steps)

    def _check(self, failure: str, ok: bool) -> None:
        if not ok:
            self.report.failures.append(failure)


def _await_workers(view: QueueView, count: int) -> None:
    eventually(lambda: sum(said.get("state") == "running" for said in view.workers().values()) >= count, f"{count} workers run", START_S)


def _idle(view: QueueView) -> bool:
    return all(said.get("held") == "0" and said.get("batch_size") == "0" for said in view.workers().values())


def _print(report: Report) -> None:
    for name, value in asdict(report).items():
        if name != "failures":
            print(f"{name.replace('_', ' '):>16}  {_plain(value)}")
    print(f"{'verdict':>16}  {'all kept' if not report.failures else f'{len(report.failures)} FAILURES'}")
    for failure in report.failures[:50]:
        print(f"{'':>16}  {failure}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in sorted(value.items()))
    return "unknown" if value is None else str(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake", help="arithmetic instead of the model, or the model")
    parser.add_argument("--model", default="demo", help="with --engine real")
    parser.add_argument("--server", choices=KINDS, default="valkey")
    parser.add_argument(
        "--fsync", choices=("always", "everysec"), default="always", help="with everysec the last second is lost, and has to be recovered"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults; the end takes some more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--max-batch-size", type=int, default=100, help="of each worker")
    parser.add_argument("--fetch-ahead", type=int, default=0, help="of each worker")
    parser.add_argument("--max-tokens", type=int, default=60, help="of a request, at most")
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}; default: all"
    )
    parser.add_argument("--pause", type=float, help="seconds between two faults, at most [default: 2, with the model 20]")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the fake engine")
    parser.add_argument("--keep", type=Path, help="folder for the workers' logs and the trace [default: thrown away]")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> Report:
    """One run with the options of `parse`."""
    if args.engine == "real":  # workers that compete for cores wait for each other in every step
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.workers)))
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as folder:
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
        return Chaos(args, args.keep or Path(folder)).run()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers and server go with us
    report = run(args)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        _print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
