"""Compares numbers at load, so that nothing is ever silently wrong: the model over the paged cache against its own attention.

Two sequences are computed in chunks and mixed, as in the engine. Models that are known to run wrongly have been refused before
(`compatibility`, `attention.layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from producer.sampling import SamplingParams
from worker.engine.arithmetic import ceil_div
from worker.engine.attention.interface import attention_implementation
from worker.engine.attention.layers import AttentionLayer
from worker.engine.compatibility import refusal
from worker.engine.config import PROBE_TOKENS
from worker.engine.input_batch import Forward, InputBatch
from worker.engine.request import Request
from worker.engine.step import ScheduledChunk

_TAIL = 12  # positions compared, the last of each sequence
_LONGEST_WINDOW = 256  # the sequences are longer than windows up to this; the masks of longer windows are compared in `attention.layers`
SPLIT_TOKENS = 540  # of a sequence that attention kernels split, as they do one of three quarters of it; 64 blocks of 16 hold both
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_INT8_CACHE_TOLERANCE = 2e-1
# What float32 products round as, by torch's setting: TF32 has as many digits as float16.
_PRODUCTS_ROUND_AS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
_QUANTILE = 0.75  # share of the rows that must agree: a router's near tie may go either way


@torch.inference_mode()
def check_numbers(
    model: Any,
    forward: Forward,
    layers: Sequence[AttentionLayer],
    *,
    block_size: int,
    num_blocks: int,
    max_tokens: int,
    max_model_len: int,
    int8_cache: bool = False,
    min_tokens: int = PROBE_TOKENS,
) -> None:
    """Compare logits of two sequences, computed in chunks and mixed over the paged cache, with those of the model's own attention.

    Uses the first blocks of the cache; its owner clears them.

    Args:
        num_blocks: of the cache that may be used.
        max_tokens: most tokens of one step; if that is 1, only one sequence is tried.
        int8_cache: whether the cache rounds keys and values to int8.
        min_tokens: of the longer sequence, if context and blocks allow.

    Raises:
        ModelUnavailable: they differ by more than the dtype's rounding explains.
    """
    longest = min(max(min_tokens, _past_windows(layers)), max_model_len, num_blocks * block_size)
    requests = _probe_requests(model, longest, block_size, num_blocks)[:max_tokens]
    inputs = InputBatch(
        max_tokens=max_tokens, max_requests=len(requests), max_blocks=num_blocks, block_size=block_size, device=model.device
    )
    tails: dict[Request, list[Tensor]] = {request: [] for request in requests}
    for chunks in _steps(requests, max_tokens):
        step = inputs.build(chunks)
        rows = [_tail_rows(chunk, start) for chunk, start in zip(chunks, step.token_starts, strict=False)]
        wanted = torch.tensor([row for part in rows for row in part], dtype=torch.int64, device=model.device)
        for chunk, logits in zip(chunks, forward(step, wanted).split([len(part) for part in rows]), strict=True):
            tails[chunk.request].append(logits)
    dtype = _PRODUCTS_ROUND_AS[torch.get_float32_matmul_precision()] if model.dtype == torch.float32 else model.dtype
    tolerance = max(_TOLERANCE[dtype], _INT8_CACHE_TOLERANCE if int8_cache else 0.0)
    for request, tail in tails.items():
        difference = _difference(torch.cat(tail), _own_logits(model, request))
        if not difference <= tolerance:  # so that NaN is refused too
            raise refusal(model.config, f"over the paged cache its logits differ by {difference:.2g} from those of its own attention")


def _past_windows(layers: Sequence[AttentionLayer]) -> int:
    """A length past the longest window that is short enough."""
    return PROBE_TOKENS + max((layer.window for layer in layers if layer.window and layer.window <= _LONGEST_WINDOW), default=0)


def _probe_requests(model: Any, longest: int, block_size: int, num_blocks: int) -> list[Request]:
    """Two sequences of random tokens, the second shorter, if there are blocks for both; their blocks are scattered."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    requests: list[Request] = []
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for length in (longest, longest - longest // 4):
        count = ceil_div(length, block_size)
        if count <= len(free):
            token_ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
            requests.append(Request(f"probe-{length}", token_ids, SamplingParams(), 1, block_ids=free[:count]))
            free = free[count:]
    return requests


def _steps(requests: Sequence[Request], max_tokens: int) -> Iterator[list[ScheduledChunk]]:
    """Chunks as a scheduler plans them: long and short, decodes beside chunks and beside decodes; decodes come first."""
    most = max_tokens - len(requests) + 1
    shapes = ((0.5, 0.5, 1, 3, 1, 1), (1, 1, 1.0, 1, 2, 1))  # an int is a number of tokens, a float a share of the rest
    lengths = [_chunk_lengths(request.num_tokens, shape, most) for request, shape in zip(requests, shapes, strict=False)]
    starts = [0] * len(requests)
    while any(lengths):
        chunks = []
        for i, request in enumerate(requests):
            if lengths[i]:
                length = lengths[i].pop(0)
                chunks.append(ScheduledChunk(request, starts[i], length, starts[i] + length == request.num_tokens))
                starts[i] += length
        yield sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)


def _chunk_lengths(num_tokens: int, shape: Sequence[float], most: int) -> list[int]:
    """Lengths of the chunks of ``num_tokens`` tokens by a pattern, none longer than ``most``."""
    lengths: list[int] = []
    rest = num_tokens - sum(part for part in shape if isinstance(part, int))
    for part in shape:
        wanted = part if isinstance(part, int) else round(part * rest)
        while wanted > 0 and (left := num_tokens - sum(lengths)):
            lengths.append(min(wanted, most, left))
            wanted -= lengths[-1]
    left = num_tokens - sum(lengths)
    return lengths + [1] * left


def _tail_rows(chunk: ScheduledChunk, token_start: int) -> list[int]:
    """The chunk's tokens, as rows of the step, that are among the last of their sequence."""
    first = max(chunk.start, chunk.request.num_tokens - _TAIL)
    return list(range(token_start + first - chunk.start, token_start + chunk.num_tokens))


def _own_logits(model: Any, request: Request) -> Tensor:
    """Logits of the last positions by the model's own attention, with the sequence alone and complete."""
    tokens = torch.tensor([request.prompt_token_ids], device=model.device)
    with attention_implementation(model, "eager"):
        output = model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=model.device)[None],
            use_cache=False,
            logits_to_keep=min(_TAIL, tokens.shape[1]),
        )
    logits: Tensor = output.logits[0]
    return logits


def _difference(logits: Tensor, expected: Tensor) -> float:
    """A high quantile over the rows of the norm of the difference divided by the norm of the expected row, both centred."""
    expected = expected.float() - expected.float().mean(-1, keepdim=True)
    logits = logits.float() - logits.float().mean(-1, keepdim=True)
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(_QUANTILE))
