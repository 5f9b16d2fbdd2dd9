from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from producer.sampling import SamplingParams
from worker.engine.arithmetic import ceil_div
from worker.engine.input_batch import BlockTables, InputBatch, StepInputs
from worker.engine.request import Request
from worker.engine.step import ScheduledChunk

BLOCK_SIZE = 4
MAX_REQUESTS = 3


def request(name: str, num_prompt_tokens: int, block_ids: Sequence[int], num_output_tokens: int = 0) -> Request:
    output = list(range(1000, 1000 + num_output_tokens))
    return Request(name, list(range(num_prompt_tokens)), SamplingParams(), 10, block_ids=list(block_ids), output_token_ids=output)


def batch() -> InputBatch:
    return InputBatch(max_tokens=32, max_requests=MAX_REQUESTS, max_blocks=8, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def check(inputs: StepInputs, chunks: Sequence[ScheduledChunk]) -> None:
    """Against the same, token by token."""
    token_ids, positions, slots = [], [], []
    for asked, start, count, _ in chunks:
        known = asked.prompt_token_ids + asked.output_token_ids
        for position in range(start, start + count):
            token_ids.append(known[position])
            positions.append(position)
            slots.append(asked.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    meta = inputs.meta
    assert inputs.input_ids.tolist() == [token_ids]
    assert inputs.positions.tolist() == [positions]
    assert meta.positions.tolist() == positions
    assert meta.slot_mapping.tolist() == slots
    counts = [chunk.num_tokens for chunk in chunks]
    assert inputs.token_starts == meta.query_start_loc.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = [chunk.start + chunk.num_tokens for chunk in chunks]
    assert meta.seq_lens.tolist() == lengths
    for row, chunk, length in zip(meta.block_tables.tolist(), chunks, lengths, strict=True):
        used = ceil_div(length, BLOCK_SIZE)
        assert row[:used] == chunk.request.block_ids[:used]
    assert meta.num_decodes == next((i for i, count in enumerate(counts) if count > 1), len(counts))
    assert (meta.max_query_len, meta.max_seq_len, meta.block_size) == (max(counts), max(lengths), BLOCK_SIZE)
    assert {meta.query_start_loc.dtype, meta.seq_lens.dtype, meta.block_tables.dtype} == {torch.int32}
    assert {inputs.input_ids.dtype, inputs.positions.dtype, meta.slot_mapping.dtype} == {torch.int64}


def test_decodes_then_chunks() -> None:
    decode = request("a", 5, [7, 2], num_output_tokens=2)
    start, middle = request("b", 9, [1, 5]), request("c", 12, [0, 3, 6])
    chunks = [ScheduledChunk(decode, 6, 1, True), ScheduledChunk(start, 0, 5, False), ScheduledChunk(middle, 3, 9, True)]
    check(batch().build(chunks), chunks)


def test_a_chunk_over_the_end_of_the_prompt_takes_the_output_that_was_resumed() -> None:
    chunks = [ScheduledChunk(request("a", 3, [1, 2], num_output_tokens=4), 1, 6, True)]
    check(batch().build(chunks), chunks)


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_of_requests(seed: int) -> None:
    """More requests than there are rows; blocks grow, and are replaced if a request was preempted and came back."""
    rng = random.Random(seed)
    inputs = batch()
    requests = [request(str(i), 20, []) for i in range(12)]
    for _ in range(60):
        chunks = []
        for asked in rng.sample(requests, rng.randint(1, MAX_REQUESTS)):
            if rng.random() < 0.2:
                asked.block_ids = []
            start = rng.randrange(19)
            end = rng.randrange(start + 1, min(20, start + 9) + 1)
            missing = ceil_div(end, BLOCK_SIZE) - len(asked.block_ids)
            asked.block_ids.extend(rng.randrange(100) for _ in range(missing))
            chunks.append(ScheduledChunk(asked, start, end - start, False))
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        check(inputs.build(chunks), chunks)


def test_only_what_a_request_gained_is_written() -> None:
    tables = BlockTables(2, 8)
    asked = request("a", 5, [3, 4])
    (row,) = tables.rows([asked])
    tables.table[row, 0] = 99
    asked.block_ids.append(5)
    assert tables.rows([asked]) == [row]
    assert tables.table[row, :3].tolist() == [99, 4, 5]
