"""What bulk jobs make of their lines, run by real rq workers and answered by a scripted responder."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.bulk import queue as bulk_jobs
from producer.errors import BatchFailed, Cancelled
from producer.keys import Keys
from tests.bulk import HEADRACE, await_true, make_spec, num_lines, records, work_off
from tests.responder import Responder, Taken, echo
from tests.servers import Server
from worker.embedded import EmbeddedQueue


def test_answers_come_in_input_order_with_a_summary_and_without_pickle(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    def backwards(taken: Taken) -> None:
        held.append(taken)
        if len(held) == 5 or taken.request.prompt == "p12":
            while held:
                echo(held.pop())

    held: list[Taken] = []
    spec = make_spec(tmp_path, [f"p{i}" for i in range(13)], window=5)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", backwards).running() as responder:
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == [f"p{i}" for i in range(13)]
    assert {(request.tier, request.source) for request in responder.seen} == {("batch", "bulk")}
    summary = bulk_jobs.fetch(connection, "job").return_value()
    assert (summary["state"], summary["total"], summary["succeeded"], summary["failed"]) == ("done", 13, 13, 0)
    assert summary["completion_tokens"] == sum(len(f"p{i}") for i in range(13))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    hashes = [connection.hgetall(key) for key in connection.scan_iter(match="rq:job:*", _type="hash")]
    values = [value for fields in hashes for name, value in fields.items() if name != b"data"]
    assert json.loads(hashes[0][b"meta"])
    assert not any(b"\x80\x04" in value or b"\x80\x05" in value for value in values)  # how a pickle begins


def test_answers_as_they_come_do_not_wait_for_a_slow_first_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    def first_last(taken: Taken) -> None:
        if taken.request.prompt == "p0":
            held.append(taken)
        else:
            echo(taken)
        if taken.request.prompt == "p9":
            await_true(lambda: num_lines(spec.output + ".part") == 9, "all but the first line are written")
            echo(held.pop())

    held: list[Taken] = []
    spec = make_spec(tmp_path, [f"p{i}" for i in range(10)], window=3, order="completion")
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", first_last).running():
        work_off(own_server)
    texts = [record["text"] for record in records(spec.output)]
    assert texts[-1] == "p0"
    assert sorted(texts) == sorted(f"p{i}" for i in range(10))


def test_window_bounds_what_is_on_the_queue(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    depths: list[int] = []

    def measure(taken: Taken) -> None:
        depths.append(taken.client.xlen(taken.keys.stream("batch")))
        echo(taken)

    bulk_jobs.submit(connection, make_spec(tmp_path, [f"p{i}" for i in range(60)], window=7))
    with Responder(own_server.url, "default", measure).running():
        work_off(own_server)
    assert len(depths) == 60
    assert max(depths) <= 7


def test_what_another_try_may_cure_is_tried_again_and_the_rest_goes_to_the_errors(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    failures = Counter[str]()

    def trouble(taken: Taken) -> None:
        prompt = taken.request.prompt or ""
        failures[prompt] += 1
        if prompt == "hopeless" or (prompt == "cured" and failures[prompt] < 3):
            taken.error(BatchFailed("the step raised"))
        elif prompt == "cancelled":
            taken.error(Cancelled("by an operator"))
        else:
            echo(taken)

    lines = [
        "cured",
        "hopeless",
        "cancelled",
        {"custom_id": "x", "body": {"prompt": "p", "top_p": 7}},
        {"custom_id": "y", "body": 1},
        "fine",
    ]
    spec = make_spec(tmp_path, lines, retries=2)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default", trouble).running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["cured", "fine"]
    failed = {record["line"]: record for record in records(spec.errors)}
    assert {number: record["error"]["code"] for number, record in failed.items()} == {
        2: "BATCH_FAILED",
        3: "CANCELLED",
        4: "INVALID_REQUEST",
        5: "INVALID_REQUEST",
    }
    assert (failed[4]["custom_id"], failed[4]["error"]["param"], failed[5]["custom_id"]) == ("x", "top_p", "y")
    assert (failures["cured"], failures["hopeless"], failures["cancelled"]) == (3, 3, 1)
    summary = bulk_jobs.fetch(connection, "job").return_value()
    assert (summary["succeeded"], summary["failed"], summary["errors"]) == (2, 4, spec.errors)


def test_full_queue_is_waited_for_and_fails_no_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    connection.hset(Keys("default").limits, "max_depth:batch", "2")
    spec = make_spec(tmp_path, [f"p{i}" for i in range(12)], retries=0)
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert len(records(spec.output)) == 12
    assert not Path(spec.errors).exists()


def test_lines_that_are_no_text_cost_only_themselves(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [])
    huge = b'"' + b"x" * (9 * 1024 * 1024) + b'"\n'
    Path(spec.input).write_bytes(b'\xef\xbb\xbf"first"\r\n\n"\xff"\n' + huge + b'"last, without a newline"')
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [(record["line"], record["text"]) for record in records(spec.output)] == [(1, "first"), (5, "last, without a newline")]
    assert [record["line"] for record in records(spec.errors)] == [3, 4]


def test_lone_surrogate_harms_its_own_line_alone(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    """JSON can name one, and UTF-8 cannot carry it: in a label, a name and a value, in each form of line."""
    lone = "\ud800"
    bad: list[Any] = [
        lone,
        {"custom_id": lone, "prompt": "x"},
        {"custom_id": lone, "body": 17},
        {"custom_id": "named", lone: 1, "prompt": "x"},
        {"custom_id": "nested", "body": {"prompt": "x", lone: 1}},
        {"custom_id": "message", "body": {"messages": [{"role": "user", "content": "x", lone: lone}]}},
        {"prompt": "x", "stop": lone},
        {"prompt": "x", "user": lone},
    ]
    spec = make_spec(tmp_path, ["first", *bad, "last"])
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["first", "last"]
    failed = {record["line"]: record for record in records(spec.errors)}
    assert [failed[number]["error"]["code"] for number in range(2, 10)] == ["INVALID_REQUEST"] * len(bad)
    assert [failed[number]["custom_id"] for number in range(2, 8)] == [None, lone, lone, "named", "nested", "message"]
    assert failed[5]["error"]["param"] == failed[6]["error"]["param"] == lone


def test_text_file_has_a_prompt_a_line(own_server: Server, connection: redis.Redis, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [], input=f"{tmp_path}/in.txt")
    Path(spec.input).write_text('Why?\n{"x": 1}\n')
    bulk_jobs.submit(connection, spec)
    with Responder(own_server.url, "default").running():
        work_off(own_server)
    assert [record["text"] for record in records(spec.output)] == ["Why?", '{"x": 1}']


def test_output_of_another_job_is_not_touched_and_the_job_fails_at_once(
    own_server: Server, connection: redis.Redis, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, ["a"])
    Path(spec.output).write_text('{"id":"other.1"}\n')
    bulk_jobs.submit(connection, spec)
    work_off(own_server)
    assert Path(spec.output).read_text() == '{"id":"other.1"}\n'
    (item,) = bulk_jobs.jobs(connection)
    assert item.status == "failed"
    assert "is not of this job" in (item.error or "")


def test_real_worker_answers_a_file_of_chats_and_embeddings_beside_a_realtime_caller(real_queue: EmbeddedQueue, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "any", "messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 4, "temperature": 0},
        }
        for i in range(12)
    ]
    embedding = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "any", "input": ["Once"]}}
    spec = make_spec(tmp_path, [*lines, embedding])
    environment = os.environ | {"HEADRACE_REDIS": real_queue.url}
    with bulk_jobs.rq_connection(real_queue.url) as connection, real_queue.client() as client:
        bulk_jobs.submit(connection, spec)
        worker = subprocess.Popen([*HEADRACE, "bulk", "worker", "--burst"], env=environment, stderr=subprocess.DEVNULL)
        answer = client.submit_and_wait("The capital of France is", max_tokens=4, temperature=0, timeout=240)
        assert worker.wait(240) == 0
    assert "Paris" in answer.text
    *said, embedded = records(spec.output)
    assert [record["custom_id"] for record in said] == [f"c{i}" for i in range(12)]
    (vector,) = embedded["response"]["body"]["data"]
    assert math.hypot(*vector["embedding"]) == pytest.approx(1.0, rel=1e-3)
    assert all(record["response"]["body"]["usage"]["completion_tokens"] in range(1, 5) for record in said)
    assert all(record["response"]["body"]["choices"][0]["message"]["content"] for record in said)
