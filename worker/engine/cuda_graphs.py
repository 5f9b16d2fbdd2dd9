"""Decode steps as CUDA graphs: hundreds of kernel launches become one.

On a small model the launches of an eager step take longer than the device needs for its work; a graph replays them all at once
(CUDA graphs; vLLM and SGLang decode in the same way). A graph's shapes and addresses are fixed, so there is one for each of a few
batch sizes, over buffers that all of them share. A batch is padded to the next size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.engine.attention.metadata import StepMetadata

Decode = Callable[[Tensor, Tensor, StepMetadata, Tensor], tuple[Tensor, ...]]
"""(input_ids [1, T], positions [1, T], metadata, rows whose logits are wanted) -> tensors with one row per token, without waiting for
the device."""


class Recording(Protocol):
    """Work on the device that can be repeated on the same addresses."""

    def replay(self) -> object: ...


Work = Callable[[], tuple[Tensor, ...]]
Record = Callable[[Work], tuple[Recording, tuple[Tensor, ...]]]
"""Runs a function and records its work; returns the recording and the function's result, whose memory a replay overwrites."""


class _Graph(NamedTuple):
    recording: Recording
    result: tuple[Tensor, ...]


class DecodeGraphs:
    """Graphs of decode steps, for the batch sizes 1, 2, 4, 8, ... and ``max_batch_size``.

    A padded row has slot -1 and length 0: the attention kernels neither write nor read the KV cache for it, so it cannot touch a
    live block. Its other inputs are token 0 at position 0, and its logits are not used.

    Args:
        decode: see `Decode`.
        max_batch_size: the largest batch that is replayed; larger ones are refused by `run`.
        max_blocks: columns of a block table: blocks of the longest possible sequence.
        record: makes the recordings; by default CUDA graphs that share one memory pool.
    """

    def __init__(
        self,
        decode: Decode,
        max_batch_size: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        self._decode = decode
        self._record = record if record is not None else CudaGraphRecorder(device)
        self._sizes = padded_sizes(max_batch_size)
        self._block_size = block_size
        self._ids = torch.zeros(1, max_batch_size, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._slots = torch.full((max_batch_size,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_batch_size, device=device)
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory.

        Raises the error of whatever the model does that a capture does not allow (most likely a wait for the device).
        """
        for size in reversed(self._sizes):
            self._graph(size)

    @torch.inference_mode()
    def run(self, input_ids: Tensor, positions: Tensor, meta: StepMetadata) -> tuple[Tensor, ...] | None:
        """Replay a step.

        Args:
            input_ids: ``[1, B]``; positions ``[1, B]``.

        Returns:
            What `Decode` returns, of B rows, overwritten by the next replay; None if the batch is not of decodes alone, or is too large.
        """
        count = meta.seq_lens.shape[0]
        if meta.num_decodes < count or count > self._sizes[-1]:
            return None
        graph = self._graph(next(size for size in self._sizes if size >= count))
        self._ids[:, :count].copy_(input_ids)
        self._positions[:, :count].copy_(positions)
        self._fill(meta, count)
        graph.recording.replay()
        return tuple(tensor[:count] for tensor in graph.result)

    def _graph(self, size: int) -> _Graph:
        if size not in self._graphs:
            self._pad_from(0)
            inputs = self._ids[:, :size], self._positions[:, :size], self._meta(size), self._rows[:size]
            self._graphs[size] = _Graph(*self._record(lambda: self._decode(*inputs)))
        return self._graphs[size]

    def _fill(self, meta: StepMetadata, count: int) -> None:
        self._slots[:count].copy_(meta.slot_mapping)
        self._seq_lens[:count].copy_(meta.seq_lens)
        self._tables[:count, : meta.block_tables.shape[1]].copy_(meta.block_tables)
        self._pad_from(count)

    def _pad_from(self, count: int) -> None:
        """Disable the rows after the batch: the requests that used them before may have given their blocks to others."""
        self._ids[:, count:].zero_()
        self._positions[:, count:].zero_()
        self._slots[count:].fill_(-1)
        self._seq_lens[count:].zero_()

    def _meta(self, size: int) -> StepMetadata:
        return StepMetadata(
            query_start_loc=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:size],
            slot_mapping=self._slots[:size],
            positions=self._positions[0, :size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._tables.shape[1] * self._block_size,
            block_size=self._block_size,
        )


class CudaGraphRecorder:
    """Records into CUDA graphs that share memory: one replays at a time. All graphs of a device are recorded on one stream.

    Nothing that waits for the device may enter a capture: it would abort the capture, and torch (2.13) then leaves the allocator
    and the thread in capture mode, so that memory can never be released again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> tuple[Recording, tuple[Tensor, ...]]:
        """Run ``work`` twice, for compilation, lazy set-up and to check that it does not wait, then record it.

        Raises:
            RuntimeError: it waits for the device, or cannot be captured; the thread is back on its previous stream.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
                with waits_raise():
                    work()
        finally:
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        finally:
            torch.cuda.set_stream(current)  # torch does so itself only if the capture succeeds
        return graph, result


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device for the process's life: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream on which it was called."""
    return torch.cuda.Stream(device)


@contextmanager
def waits_raise() -> Iterator[None]:
    """Within this, waiting for a device raises RuntimeError; in all threads, since torch has only one such mode."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning that the mode does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def padded_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, ... below ``max_batch_size``, and ``max_batch_size``."""
    sizes = []
    size = 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch_size]
