"""The main job on real parts: blocking callers, a real server, a real model."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from producer.client import Client
from producer.codec import decode_frame
from producer.errors import ContextLengthExceeded, InvalidRequest, error_from_code
from producer.keys import GROUP, TIERS
from tests.workers import eventually

STORY = "Once upon a time, in a small village by the river,"


def queue_is_empty(client: Client) -> bool:
    return all(
        client.redis.xlen(client.keys.stream(tier)) == 0 and client.redis.xpending(client.keys.stream(tier), GROUP)["pending"] == 0
        for tier in TIERS
    )


def wait_for_reply(client: Client, request_id: str) -> dict[str, Any]:
    """The final frame's body, read as a client in any language would."""
    last = "0"
    while True:
        replies = client.redis.xread({client.keys.reply(request_id): last}, block=30_000)
        assert replies, "no reply"
        for entry, fields in replies[0][1]:
            last = entry
            frame = decode_frame(fields)
            if frame.type != "tokens":
                return {"type": frame.type, **frame.body}


def test_a_caller_blocks_and_gets_the_right_answer(client: Client) -> None:
    result = client.submit_and_wait("The capital of France is", max_tokens=4, temperature=0, timeout=60)
    assert "Paris" in result.text
    assert result.finish_reason == "length"
    assert (result.usage.completion_tokens, len(result.token_ids), result.attempt) == (4, 4, 1)
    assert result.model == "SmolLM2-135M-Instruct"
    assert result.worker
    assert 0 < result.timings.ttft_ms <= result.timings.total_ms


def test_chat_messages_go_through_the_models_template(client: Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    result = client.submit_and_wait(messages=messages, max_tokens=32, temperature=0, timeout=60)
    assert "Paris" in result.text
    assert result.finish_reason == "stop"


def test_two_hundred_callers_each_get_their_own_answer_and_nothing_stays(client: Client) -> None:
    def ask(number: int) -> tuple[int, list[int]]:
        result = client.submit_and_wait(f"Count: {number}, {number + 1},", max_tokens=1 + number % 24, temperature=0, timeout=240)
        assert result.usage.completion_tokens <= 1 + number % 24
        return number, result.token_ids

    with ThreadPoolExecutor(200) as pool:
        together = dict(pool.map(ask, range(200)))
    for number in (0, 57, 123, 199):
        assert ask(number)[1] == together[number]
    eventually(lambda: queue_is_empty(client), "the streams are empty")
    replies = list(client.redis.scan_iter(client.keys.reply("*")))
    assert len(replies) >= 200
    assert all(client.redis.pttl(key) > 0 for key in replies)


def test_a_bare_xadd_is_answered_like_any_other(client: Client) -> None:
    request = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    client.redis.xadd(client.keys.stream("realtime"), {"id": "bare-1", "json": json.dumps(request)})
    body = wait_for_reply(client, "bare-1")
    assert body["type"] == "final"
    assert "Paris" in body["text"]


@pytest.mark.parametrize(
    "prompt",
    [
        "Emoji: 😀 😃 😄 🎉 👍🏽 👨‍👩‍👧 🇫🇷 😀 😃 😄 🎉 👍🏽 👨‍👩‍👧 🇫🇷",
        "日本語と中文: 東京、京都、大阪、北京、上海、東京、京都、大阪、",
        "Combining marks: e\u0301 a\u0300 o\u0308 n\u0303 e\u0301 a\u0300 o\u0308 n\u0303",
    ],
)
def test_streamed_chunks_join_to_the_final_text(client: Client, prompt: str) -> None:
    handle = client.submit(prompt, max_tokens=48, temperature=0, ignore_eos=True, stream=True)
    chunks = list(handle.stream(timeout=60))
    result = handle.result(timeout=10)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert all("\ufffd" not in chunk.text for chunk in chunks[:-1])


def test_a_stop_string_that_spans_tokens_never_leaks(client: Client) -> None:
    whole = client.submit_and_wait(STORY, max_tokens=40, temperature=0, timeout=60).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 9]
    handle = client.submit(STORY, max_tokens=40, temperature=0, stop=stop, stream=True)
    text = "".join(chunk.text for chunk in handle.stream(timeout=60))
    result = handle.result(timeout=10)
    assert text == result.text == whole[: whole.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("wrong type", b'{"prompt": 5}', "prompt"),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', "json"),
    ("infinite", b'{"prompt": "a", "top_p": 1e999}', "top_p"),
    ("empty prompt", b'{"prompt": ""}', "prompt"),
    ("lone surrogate", b'{"prompt": "a\\ud800"}', "prompt"),
    ("NUL", b'{"prompt": "a\\u0000b"}', "prompt"),
    ("no tokens wanted", b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    ("beyond 64 bits", b'{"prompt": "a", "seed": 99999999999999999999999}', "seed"),
    ("unknown token", b'{"prompt_token_ids": [49152]}', "prompt_token_ids"),
    ("garbage", b"\xff\xfe\x00garbage", "json"),
    ("not an object", b"[1, 2]", "json"),
    ("too many tokens", b'{"prompt": "a", "max_tokens": 900000}', "max_tokens"),
]


def test_bad_input_is_answered_by_field_and_disturbs_no_neighbour(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    undisturbed = client.submit_and_wait(STORY, timeout=60, **options).token_ids
    neighbour = client.submit(STORY, stream=True, **options)
    started = threading.Event()

    def follow() -> list[int]:
        seen = []
        for chunk in neighbour.stream(timeout=60):
            seen.extend(chunk.token_ids)
            started.set()
        return seen

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        assert started.wait(30)
        send_bad_requests_and_check_their_errors(client)
        assert following.result() == undisturbed
    eventually(lambda: queue_is_empty(client), "the request without an id is gone too")


def send_bad_requests_and_check_their_errors(client: Client) -> None:
    for number, (_, body, _) in enumerate(BAD_BODIES):
        client.redis.xadd(client.keys.stream("realtime"), {"id": f"bad-{number}", "json": body})
    client.redis.xadd(client.keys.stream("realtime"), {"json": b'{"prompt": "an id is missing"}'})
    for number, (what, _, field) in enumerate(BAD_BODIES):
        body = wait_for_reply(client, f"bad-{number}")
        error = error_from_code(body["code"], body["message"])
        assert isinstance(error, InvalidRequest), what
        assert body["field"].startswith(field), (what, body)
        assert body["retryable"] is False


def test_a_prompt_over_the_context_is_refused_with_the_numbers(client: Client) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"8192|\d+ tokens"):
        client.submit_and_wait(prompt_token_ids=[5] * 9000, max_tokens=8, timeout=30)


def test_seeded_sampling_does_not_depend_on_the_neighbours(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "timeout": 120}
    alone = client.submit_and_wait(STORY, **options).token_ids
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(client.submit_and_wait, f"{i} {STORY}", max_tokens=24, temperature=1.5, timeout=120) for i in range(15)]
        again = client.submit_and_wait(STORY, **options).token_ids
        for other in others:
            other.result()
    assert again == alone
