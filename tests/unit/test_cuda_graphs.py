"""The buffers and padding of captured decode steps, with recordings that call the function again: what a graph replay amounts to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from worker.engine import cuda_graphs
from worker.engine.arithmetic import ceil_div
from worker.engine.attention.metadata import StepMetadata
from worker.engine.cuda_graphs import CudaGraphRecorder, DecodeGraphs, Work, padded_sizes

BLOCK_SIZE = 16
COLUMNS = 8


class Batch(NamedTuple):
    input_ids: Tensor
    positions: Tensor
    meta: StepMetadata


class Again:
    """A recording that repeats the work and writes the result to the same memory."""

    def __init__(self, work: Work, result: tuple[Tensor, ...]) -> None:
        self._work = work
        self._result = result

    def replay(self) -> None:
        for old, new in zip(self._result, self._work(), strict=True):
            old.copy_(new)


class Recorder:
    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, work: Work) -> tuple[Again, tuple[Tensor, ...]]:
        self.num_recorded += 1
        result = work()
        return Again(work, result), result


def seen(batch: Batch) -> Tensor:
    """Everything that a forward may read of each row, as its logits."""
    meta = batch.meta
    tables = torch.full((len(meta.seq_lens), COLUMNS), -7, dtype=torch.int32)
    tables[:, : meta.block_tables.shape[1]] = meta.block_tables
    tables = torch.where(torch.arange(COLUMNS) * BLOCK_SIZE < meta.seq_lens[:, None], tables, -7)
    columns = [batch.input_ids[0], batch.positions[0], meta.slot_mapping, meta.seq_lens, *tables.T]
    return torch.stack([column.double() for column in columns], dim=1)


def decodes(*lengths: int, token: int = 1) -> Batch:
    count = len(lengths)
    blocks = torch.arange(count * COLUMNS, dtype=torch.int32).view(count, COLUMNS) + 1
    width = ceil_div(max(lengths), BLOCK_SIZE)
    positions = torch.tensor(lengths) - 1
    slots = blocks[torch.arange(count), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    meta = StepMetadata(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=blocks[:, :width],
        slot_mapping=slots.long(),
        positions=positions,
        num_decodes=count,
        max_query_len=1,
        max_seq_len=max(lengths),
        block_size=BLOCK_SIZE,
    )
    return Batch((torch.arange(count) + token)[None], positions[None], meta)


def make_graphs(max_batch_size: int) -> tuple[DecodeGraphs, Recorder, list[Tensor]]:
    recorder = Recorder()
    whole: list[Tensor] = []

    def forward(input_ids: Tensor, positions: Tensor, meta: StepMetadata, rows: Tensor) -> tuple[Tensor, ...]:
        whole.append(seen(Batch(input_ids, positions, meta)))
        return whole[-1][rows], input_ids[0].clone()

    graphs = DecodeGraphs(forward, max_batch_size, COLUMNS, BLOCK_SIZE, torch.device("cpu"), recorder)
    return graphs, recorder, whole


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert padded_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert padded_sizes(8) == [1, 2, 4, 8]
    assert padded_sizes(1) == [1]


def test_a_replay_sees_the_batch_and_padded_rows_touch_no_block() -> None:
    graphs, _, whole = make_graphs(8)
    for lengths in ((5, 17, 100), (1,), (40,) * 8, (33, 2, 7, 128, 64)):
        batch = decodes(*lengths, token=len(lengths))
        result = graphs.run(*batch)
        assert result is not None
        assert torch.equal(result[0], seen(batch))
        assert torch.equal(result[1], batch.input_ids[0])
        for row in whole[-1][len(lengths) :].tolist():
            assert row == [0, 0, -1, 0, *[-7] * COLUMNS]


def test_each_size_is_recorded_once_and_only_over_padded_rows() -> None:
    graphs, recorder, whole = make_graphs(6)
    graphs.capture_all()
    assert recorder.num_recorded == 4
    assert sorted(len(rows) for rows in whole) == [1, 2, 4, 6]
    assert all((rows[:, 2] == -1).all() for rows in whole)
    graphs.run(*decodes(3, 4, 5))
    assert recorder.num_recorded == 4


def test_a_recording_made_between_steps_does_not_see_the_last_batch() -> None:
    graphs, _, whole = make_graphs(8)
    graphs.run(*decodes(100, 90))
    num_calls = len(whole)
    graphs.run(*decodes(9, 9, 9))
    assert (whole[num_calls][:, 2] == -1).all()


def test_steps_with_chunks_and_larger_batches_are_refused() -> None:
    graphs, recorder, _ = make_graphs(2)
    assert graphs.run(*decodes(1, 2, 3)) is None
    one = decodes(5)
    chunk = replace(one.meta, num_decodes=0)
    assert graphs.run(one.input_ids, one.positions, chunk) is None
    assert recorder.num_recorded == 0


class FakeCuda:
    """Stands in for the parts of `torch.cuda` that a recording is made of: which stream is current, and what torch leaves behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.before = FakeStream()
        self.mode = 0
        self.captures = 0
        self.captured_on: set[FakeStream] = set()
        monkeypatch.setattr(cuda_graphs, "_capture_stream", cache(lambda _: FakeStream()))
        for name in ("set_stream", "stream", "graph", "set_sync_debug_mode"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.mode = 2 if mode == "error" else int(mode)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _: object, *, stream: FakeStream, **__: object) -> Iterator[None]:
        self.captures += 1
        self.captured_on.add(stream)
        self.current = stream
        yield  # what raises inside leaves the stream as it is, as torch does
        self.current = self.before

    def wait(self) -> None:
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


def test_all_recordings_of_a_device_are_made_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    for _ in range(2):
        record = CudaGraphRecorder(torch.device("cuda", 0))
        assert record(lambda: (torch.ones(1),))[1] == (torch.ones(1),)
    assert (cuda.captures, len(cuda.captured_on)) == (2, 1)
    assert (cuda.current, cuda.mode) == (cuda.before, 0)


def test_work_that_waits_for_the_device_does_not_reach_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaGraphRecorder(torch.device("cuda", 0))(lambda: (cuda.wait() or torch.ones(1),))
    assert cuda.captures == 0
    assert (cuda.current, cuda.mode) == (cuda.before, 0)


def test_a_capture_that_fails_leaves_the_thread_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def fail_in_capture() -> tuple[Tensor, ...]:
        if cuda.captures:
            raise RuntimeError("not permitted while a stream is captured")
        return (torch.ones(1),)

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphRecorder(torch.device("cuda", 0))(fail_in_capture)
    assert cuda.captures == 1
    assert cuda.current is cuda.before
