"""The engine on a real model, in process, without Redis, as in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from producer.sampling import SamplingParams
from producer.wire import GenerateRequest
from worker.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Any:
    return Engine.load("demo", dtype="float32", num_blocks=500)


def chat(request_id: str, question: str, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return GenerateRequest(id=request_id, messages=[{"role": "user", "content": question}], params=params)


def test_ten_lines_say_paris() -> None:
    program = """
from worker.engine import Engine
engine = Engine.load("demo", num_blocks=100)
(result,) = engine.generate("The capital of France is", temperature=0.0, max_tokens=5)
print(result.text, result.finish_reason)
import sys
assert "redis" not in sys.modules
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Paris" in printed
    assert printed.rstrip().endswith("length")


def test_answers_do_not_depend_on_who_else_asks(engine: Engine) -> None:
    questions = [f"What is the capital of {country}?" for country in ("France", "Italy", "Japan", "Spain", "Germany", "Greece")]
    alone = [engine.generate([chat(f"alone-{i}", question)])[0] for i, question in enumerate(questions)]
    wild = [chat(f"wild-{i}", "Tell me a story.", temperature=1.5, repetition_penalty=1.2, n=2, seed=i) for i in range(3)]
    together = engine.generate([chat(f"together-{i}", question) for i, question in enumerate(questions)] + wild)
    assert [(r.text, r.token_ids, r.finish_reason) for r in together[:6]] == [(r.text, r.token_ids, r.finish_reason) for r in alone]
    assert "Paris" in alone[0].text
    stopped = [r for r in alone if r.finish_reason == "stop"]
    assert stopped
    assert all(r.token_ids[-1] == 2 and "<|im_end|>" not in r.text for r in stopped)


def test_seeded_outputs_repeat_and_differ(engine: Engine) -> None:
    story = {"temperature": 1.0, "n": 3, "seed": 5, "max_tokens": 16}
    first, again = (engine.generate([chat(name, "Tell me a story.", **story)])[0] for name in ("a", "b"))
    assert first.choices == again.choices
    assert first.choices is not None
    assert len({choice.text for choice in first.choices}) == 3


def test_scores_rank_what_is_true(engine: Engine) -> None:
    scored = GenerateRequest(id="s", prompt="The capital of France is", kind="score", continuations=[" Paris", " Berlin", " banana"])
    (result,) = engine.generate([scored])
    assert result.scores is not None
    assert result.scores[0] == max(result.scores) < 0
    assert result.scores[2] == min(result.scores)


def test_embeddings_of_like_texts_are_alike(engine: Engine) -> None:
    texts = ("A cat sat on the mat.", "A kitten sat on the rug.", "Interest rates rose by two per cent.")
    vectors = [
        r.embedding or [] for r in engine.generate([GenerateRequest(id=f"e{i}", prompt=t, kind="embed") for i, t in enumerate(texts)])
    ]

    def likeness(i: int, j: int) -> float:
        return sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True))

    assert likeness(0, 0) == pytest.approx(1.0, abs=1e-4)
    assert likeness(0, 1) > likeness(0, 2)


def test_a_schema_is_kept_to_beside_free_text(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0, "maximum": 10**9}},
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    free = chat("free", "What is the capital of France?")
    before = engine.generate([free])[0].text
    structured, beside, city = engine.generate(
        [
            chat("structured", "Describe France in JSON.", response_format=form, max_tokens=80),
            free,
            chat("city", "The capital of France?", response_format={"type": "choice", "choices": ["Berlin", "Paris"]}),
        ]
    )
    assert set(json.loads(structured.text)) == {"capital", "population"}
    assert structured.finish_reason == "stop"
    assert beside.text == before
    assert (city.text, city.finish_reason) in {("Paris", "stop"), ("Berlin", "stop")}
