"""Throughput of the bare engine on a set of requests, and where its steps' time goes.

``python -m ops.bench.engine_throughput worker/bench/workloads/mixed.jsonl [--rounds 3] [--json]``

All requests are there at the start; greedy, EOS ignored, no prefix cache. A first, uncounted round warms up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.sampling import SamplingParams
from worker.engine.engine import Engine
from worker.engine.request import Request


def main() -> None:
    options = _options()
    items = [json.loads(line) for line in options.set.read_text().splitlines()][: options.count]
    engine = Engine.load(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        enable_prefix_caching=False,
    )
    rounds = [_round(engine, list(_requests(items, number))) for number in range(options.rounds + 1)][1:]
    median = sorted(rounds, key=lambda figures: figures["tokens_per_second"])[len(rounds) // 2]
    print(json.dumps(median) if options.json else _table(options.set.stem, rounds, median))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--count", type=int, help="only this many requests, the first ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-batch-size", type=int, default=128)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _requests(items: list[dict[str, Any]], number: int) -> Iterator[Request]:
    for i, item in enumerate(items):
        params = SamplingParams(temperature=0.0, max_tokens=item["max_tokens"], ignore_eos=True)
        yield Request(f"{number}-{i}", list(item["prompt_ids"]), params, item["max_tokens"], arrival=i)


def _round(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    before = engine.runner.decoder_seconds()
    for request in requests:
        engine.add(request)
    phases = Counter[str]()
    start_s, steps, tokens, batch = time.monotonic(), 0, 0, 0
    while engine.has_work():
        before_step, outputs = engine.last_step, engine.step()
        tokens += sum(len(output.token_ids) for output in outputs)
        if engine.last_step is not None and engine.last_step is not before_step:
            steps += 1
            batch += engine.last_step.batch_size
            phases.update(engine.last_step.phase_seconds)
    seconds = time.monotonic() - start_s
    decoder = {part: total - before[part] for part, total in engine.runner.decoder_seconds().items()}
    phases["model"] -= sum(decoder.values())
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "steps": steps,
        "mean_batch_size": batch / steps,
        "decoder_seconds": decoder,
        "phase_seconds": phases,
        "outside_seconds": seconds - phases.total() - sum(decoder.values()),
    }


def _table(name: str, rounds: list[dict[str, Any]], median: dict[str, Any]) -> str:
    every = ", ".join(f"{figures['tokens_per_second']:.0f}" for figures in rounds)
    lines = [
        f"{name}: {median['tokens_per_second']:.0f} output tokens/s (rounds: {every})",
        f"{median['tokens']} tokens, {median['steps']} steps, mean batch {median['mean_batch_size']:.1f}, {median['seconds']:.2f} s",
    ]
    host = {f"host: {phase}": seconds for phase, seconds in median["phase_seconds"].items() if seconds}
    shares = {**median["decoder_seconds"], **host, "outside of steps": median["outside_seconds"]}
    lines += [f"  {part:24s} {seconds:7.2f} s {100 * seconds / median['seconds']:5.1f} %" for part, seconds in shares.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
