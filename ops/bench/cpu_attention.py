"""Times one layer's attention in C: ``python -m ops.bench.cpu_attention`` (ms and GB/s, best of N).

SmolLM2-135M's shape: 9 query heads, 3 KV heads of 64.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from tests.paged_attention import Case, make_step
from worker.engine.attention.cpu_backend import CpuAttention

HEADS, KV_HEADS, DIM = 9, 3, 64


def best_ms(call: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def report(name: str, case: Case) -> None:
    """One layer, with its caches 8 times over, so that the data comes from memory as in a model of many layers."""
    steps = [make_step(case, torch.bfloat16) for _ in range(8)]
    for step in steps:
        step.k_cache.nan_to_num_()
        step.v_cache.nan_to_num_()
    attend = CpuAttention()
    turn = iter(range(10**9))

    def call() -> None:
        step = steps[next(turn) % len(steps)]
        attend(*step.arguments, **step.options)

    ms = best_ms(call)
    kv_bytes = sum(case.seq_lens) * KV_HEADS * DIM * 2 * 2
    pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(case.query_lens, case.seq_lens, strict=True))
    print(f"{name:32s} {ms:8.3f} ms  {kv_bytes / ms / 1e6:6.1f} GB/s  {pairs * HEADS * DIM * 4 / ms / 1e9:6.3f} TFLOP/s")


def main() -> None:
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    lengths = random.Random(0)
    report("64 decodes of 64-600 tokens", Case(query_lens=(1,) * 64, seq_lens=tuple(lengths.randint(64, 600) for _ in range(64)), **shape))
    report(
        "100 decodes of 64-600 tokens", Case(query_lens=(1,) * 100, seq_lens=tuple(lengths.randint(64, 600) for _ in range(100)), **shape)
    )
    report("1 decode of 8192 tokens", Case(query_lens=(1,), seq_lens=(8192,), **shape))
    report("1 decode of 300 tokens", Case(query_lens=(1,), seq_lens=(300,), **shape))
    report("chunk of 512 after 0", Case(query_lens=(512,), seq_lens=(512,), **shape))
    report("chunk of 512 after 1024", Case(query_lens=(512,), seq_lens=(1536,), **shape))


if __name__ == "__main__":
    main()
