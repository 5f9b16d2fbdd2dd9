"""What a cheaper representation costs in quality: perplexity of a text, and how many greedy outputs equal those of float32.

``python -m ops.bench.quality [--model demo] [--prompts 64] [--tokens 64] [--json]``

The text is documentation of this repository, scored by the engine in windows of 1,024 tokens, each from its second token on; the
prompts are the first 32 tokens of those in the shipped set ``mixed``. Two outputs match if all their tokens do: they differ from the
first near tie on that rounding decides the other way. transformers' own bfloat16 against its own float32 shows how much of this is
usual.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from producer.sampling import SamplingParams
from worker.bench import workloads
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import load_model
from worker.engine.request import Request

_ROOT = Path(__file__).parents[2]
_TEXT = ("ops/runbook.md", "README.md")
_WINDOW = 1024
_PROMPT_TOKENS = 32
_PADDED_BATCH = 16
_VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "bfloat16, int8 weights and KV": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
_TRANSFORMERS = "transformers, bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of one way to run the model.

    Attributes:
        perplexity: of the text; None if it was not measured.
        exact_match: share of outputs that equal float32's, token for token.
        agreeing_tokens: mean length of the common beginning of an output and float32's.
    """

    name: str
    perplexity: float | None
    exact_match: float
    agreeing_tokens: float


def main() -> None:
    options = _options()
    prompts = [request.prompt_token_ids[:_PROMPT_TOKENS] for request in workloads.load("mixed", count=options.prompts)]
    with contextlib.redirect_stdout(sys.stderr):  # the engines' log is not part of the result
        results = _measure(options.model, prompts, options.tokens)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        Console().print(_table(results, options.tokens))


def _measure(model: str, prompts: Sequence[list[int]], num_tokens: int) -> list[Quality]:
    results: list[Quality] = []
    expected: list[list[int]] = []
    for name, settings in _VARIANTS.items():
        perplexity, outputs = _run(model, settings, prompts, num_tokens)
        expected = expected or outputs
        results.append(_compared(name, perplexity, outputs, expected))
        print(results[-1])
    theirs = [_generate(model, dtype, prompts, num_tokens) for dtype in ("float32", "bfloat16")]
    return [*results, _compared(_TRANSFORMERS, None, theirs[1], theirs[0])]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _run(model: str, settings: dict[str, Any], prompts: Sequence[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Perplexity of the text, and the prompts' greedy outputs."""
    config = EngineConfig(model=model, max_batch_size=64, max_batch_tokens=512, enable_prefix_caching=False, **settings)
    loaded = load_model(config)
    engine = Engine(config, loaded)
    return _perplexity(engine, _windows(loaded.tokenizer)), _outputs(engine, prompts, num_tokens)


def _windows(tokenizer: Any) -> list[list[int]]:
    token_ids = tokenizer("\n".join((_ROOT / name).read_text() for name in _TEXT))["input_ids"]
    windows = [token_ids[i : i + _WINDOW] for i in range(0, len(token_ids), _WINDOW)]
    return [window for window in windows if len(window) > 1]


def _perplexity(engine: Engine, windows: Sequence[list[int]]) -> float:
    for i, window in enumerate(windows):
        engine.add(Request(f"score-{i}", window, SamplingParams(), 1, kind="score", score_start=1))
    total = 0.0
    while engine.has_work():
        total += sum(output.score or 0.0 for output in engine.step())
    return math.exp(-total / sum(len(window) - 1 for window in windows))


def _outputs(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(f"generate-{i}", prompt, params, num_tokens, arrival=i) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work():
        engine.step()
    return [request.output_token_ids for request in requests]


@torch.inference_mode()
def _generate(model: str, dtype: str, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' own greedy outputs, in padded batches."""
    own = load_model(EngineConfig(model=model, dtype=dtype)).model
    own.set_attn_implementation("sdpa")
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), _PADDED_BATCH):
        batch = prompts[first : first + _PADDED_BATCH]
        width = max(map(len, batch))
        token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=own.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=own.device)
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        generated = own.generate(token_ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits)
        outputs += generated[:, width:].tolist()
    return outputs


def _compared(name: str, perplexity: float | None, outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> Quality:
    pairs = list(zip(outputs, expected, strict=True))
    agreeing = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True))) for pair in pairs]
    return Quality(
        name=name,
        perplexity=perplexity,
        exact_match=sum(ours == theirs for ours, theirs in pairs) / len(pairs),
        agreeing_tokens=sum(agreeing) / len(pairs),
    )


def _table(results: Sequence[Quality], num_tokens: int) -> Table:
    table = Table("", "perplexity", "outputs as in float32", f"tokens in agreement, of {num_tokens}")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        perplexity = "" if result.perplexity is None else f"{result.perplexity:.3f}"
        table.add_row(result.name, perplexity, f"{result.exact_match:.0%}", f"{result.agreeing_tokens:.1f}")
    return table


if __name__ == "__main__":
    main()
