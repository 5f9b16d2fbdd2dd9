"""Turns a step's plan into the tensors that the model and the attention read, with no Python code per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engine.arithmetic import ceil_div
from worker.engine.attention.metadata import StepMetadata
from worker.engine.request import Request
from worker.engine.step import ScheduledChunk


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with, on its device.

    Attributes:
        input_ids, positions: ``[1, T]`` int64.
        token_starts: ``[B+1]``, on the host: where each chunk's tokens start, and T.
    """

    input_ids: Tensor
    positions: Tensor
    meta: StepMetadata
    token_starts: list[int]


Forward = Callable[[StepInputs, Tensor], Tensor]
"""The model over the paged cache: inputs and the rows whose logits are wanted, int64, to logits ``[rows, vocab]``."""


class BlockTables:
    """The block tables of the running requests, in one array that is updated with what has been added.

    A request's ``block_ids`` only grows at its end, or is replaced by another list.

    Args:
        num_rows: at least the most requests of one step.
        max_blocks: of one request.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._rows: dict[Request, _Row] = {}
        self._free = list(range(num_rows))

    def rows(self, requests: Sequence[Request]) -> list[int]:
        """The row of each request's table, up to date."""
        known = self._rows
        if len(self._free) < len(requests):
            self._forget_others(requests)
        indices = []
        for request in requests:
            row = known.get(request)
            if row is None:
                row = known[request] = _Row(self._free.pop())
            block_ids = request.block_ids
            if row.block_ids is not block_ids:
                row.block_ids, row.count = block_ids, 0
            if row.count != len(block_ids):
                self.table[row.index, row.count : len(block_ids)] = block_ids[row.count :]
                row.count = len(block_ids)
            indices.append(row.index)
        return indices

    def _forget_others(self, requests: Sequence[Request]) -> None:
        """Free the rows of requests that are not among these. Most have ended; any other gets a row again when it runs."""
        keep = set(requests)
        for request in [request for request in self._rows if request not in keep]:
            self._free.append(self._rows.pop(request).index)


class _Row:
    """A request's row: its index, and how much of which list it holds."""

    __slots__ = ("block_ids", "count", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.block_ids: list[int] | None = None
        self.count = 0


class InputBatch:
    """Host buffers, reused by every step, and their counterparts on the device.

    Args:
        max_tokens: most tokens of one step.
        max_requests: most requests of one step.
        max_blocks: most blocks of one request.
    """

    def __init__(self, *, max_tokens: int, max_requests: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._tables = BlockTables(2 * max_requests, max_blocks)
        self._input_ids = _Buffer((max_tokens,), torch.int64, device)
        self._positions = _Buffer((max_tokens,), torch.int64, device)
        self._slots = _Buffer((max_tokens,), torch.int64, device)
        self._query_start = _Buffer((max_requests + 1,), torch.int32, device)
        self._seq_lens = _Buffer((max_requests,), torch.int32, device)
        self._block_tables = _Buffer((max_requests * max_blocks,), torch.int32, device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def build(self, chunks: Sequence[ScheduledChunk]) -> StepInputs:
        """The inputs of a step, valid until the next call; decodes must come first to be treated as such."""
        if self._sent is not None:
            self._sent.synchronize()  # the device may still be reading the host buffers of the previous step
        block_size, num_requests = self._block_size, len(chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, num_requests)
        counts = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_requests)
        query_start = self._query_start.host[: num_requests + 1]
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        seq_lens = self._seq_lens.host[:num_requests]
        np.add(starts, counts, out=seq_lens, casting="same_kind")

        positions = self._positions.host[:num_tokens]
        np.add(np.arange(num_tokens), np.repeat(starts - query_start[:-1], counts), out=positions)
        rows = np.array(self._tables.rows([chunk.request for chunk in chunks]))
        blocks = self._tables.table[np.repeat(rows, counts), positions // block_size]
        self._slots.host[:num_tokens] = blocks.astype(np.int64) * block_size + positions % block_size
        self._input_ids.host[:num_tokens] = [token for chunk in chunks for token in _token_ids(chunk)]

        max_seq_len = int(seq_lens.max())
        num_columns = ceil_div(max_seq_len, block_size)
        tables = self._block_tables.host[: num_requests * num_columns].reshape(num_requests, num_columns)
        np.take(self._tables.table[:, :num_columns], rows, axis=0, out=tables)
        meta = StepMetadata(
            query_start_loc=self._query_start.send(num_requests + 1),
            seq_lens=self._seq_lens.send(num_requests),
            block_tables=self._block_tables.send(tables.size).view(num_requests, num_columns),
            slot_mapping=self._slots.send(num_tokens),
            positions=self._positions.send(num_tokens),
            num_decodes=next((i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1), num_requests),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            block_size=block_size,
        )
        input_ids = self._input_ids.send(num_tokens)
        if self._sent is not None:
            self._sent.record()
        return StepInputs(input_ids[None], meta.positions[None], meta, query_start.tolist())


def _token_ids(chunk: ScheduledChunk) -> list[int]:
    return chunk.request.tokens(chunk.start, chunk.start + chunk.num_tokens)


class _Buffer:
    """A numpy array and the device tensor that `send` fills from it: the same memory on a CPU, pinned and copied for CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._staging = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = self._staging.numpy()
        self._device = self._staging if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    def send(self, count: int) -> Tensor:
        """The first ``count`` elements on the device; the copy is queued before anything launched later."""
        if self._device is not self._staging:
            self._device[:count].copy_(self._staging[:count], non_blocking=True)
        return self._device[:count]
