"""Random steps over a paged cache, and attention in float64 by its definition, for the tests of every attention backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.engine.arithmetic import ceil_div
from worker.engine.attention.metadata import StepMetadata


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: ``query_lens[i]`` new tokens of a sequence that is ``seq_lens[i]`` long after it. Decodes come first."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_decodes(self) -> int:
        return next((i for i, count in enumerate(self.query_lens) if count != 1), len(self.query_lens))


CASES = {
    "decodes": Case(query_lens=(1, 1, 1), seq_lens=(5, 40, 17)),
    "one token": Case(query_lens=(1,), seq_lens=(1,)),
    "one chunk": Case(query_lens=(37,), seq_lens=(37,)),
    "a chunk in the middle": Case(query_lens=(21,), seq_lens=(150,)),
    "chunks of one token after a chunk": Case(query_lens=(1, 20, 1), seq_lens=(33, 20, 8)),
    "mixed": Case(query_lens=(1, 1, 7, 70), seq_lens=(30, 64, 7, 90)),
    "split decodes": Case(query_lens=(1, 1, 1), seq_lens=(1300, 3, 600)),
    "split chunks": Case(query_lens=(1, 9, 30), seq_lens=(5, 1100, 1204), num_kv_heads=1, num_heads=2),
    "multi head": Case(query_lens=(1, 18), seq_lens=(65, 18), num_heads=3, num_kv_heads=3),
    "multi query": Case(query_lens=(1, 5), seq_lens=(65, 20), num_heads=71, num_kv_heads=1, head_dim=16, value_dim=16),
    "groups of three": Case(query_lens=(1, 25), seq_lens=(65, 48), num_heads=9, num_kv_heads=3),
    "head size 80": Case(query_lens=(1, 18), seq_lens=(35, 50), head_dim=80, value_dim=80),
    "head size 12": Case(query_lens=(1, 18), seq_lens=(35, 50), head_dim=12, value_dim=12),
    "head size 256": Case(query_lens=(1, 18), seq_lens=(35, 50), head_dim=256, value_dim=256),
    "narrower values": Case(query_lens=(1, 18), seq_lens=(35, 50), head_dim=48, value_dim=24),
    "wider values": Case(query_lens=(1, 18), seq_lens=(35, 50), head_dim=24, value_dim=40),
    "blocks of 32": Case(query_lens=(1, 18), seq_lens=(35, 50), block_size=32),
    "blocks of 48": Case(query_lens=(1, 18), seq_lens=(135, 100), block_size=48),
    "window": Case(query_lens=(1, 1, 30), seq_lens=(100, 9, 90), window=20),
    "window of one": Case(query_lens=(1, 9), seq_lens=(100, 9), window=1),
    "window over splits": Case(query_lens=(1, 20), seq_lens=(1500, 1500), window=1100, num_kv_heads=1, num_heads=3),
    "soft cap": Case(query_lens=(1, 30), seq_lens=(100, 90), softcap=0.7),
    "sinks": Case(query_lens=(1, 30), seq_lens=(100, 90), sinks=True),
    "sinks over splits": Case(query_lens=(1, 20), seq_lens=(700, 1100), num_kv_heads=1, num_heads=2, sinks=True),
    "everything": Case(
        query_lens=(1, 1, 3, 20),
        seq_lens=(800, 20, 3, 1300),
        num_heads=5,
        num_kv_heads=1,
        head_dim=40,
        value_dim=72,
        window=1100,
        softcap=2.0,
        sinks=True,
    ),
}


@dataclass
class Step:
    """The tensors of a case. Cache pages and slots that hold no key are NaN; the key of a token of this step is not yet in its slot."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: StepMetadata
    options: dict[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.k_cache, self.v_cache, self.meta


def make_step(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", spare_blocks: int = 3) -> Step:
    """A random step. The blocks of the sequences are scattered among ``spare_blocks`` more."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    tables = _block_tables(case, spare_blocks).to(device)
    num_blocks = sum(ceil_div(length, case.block_size) for length in case.seq_lens) + spare_blocks
    shape = (num_blocks, case.num_kv_heads, case.block_size)
    k_cache = torch.full((*shape, case.head_dim), torch.nan, dtype=dtype, device=device)
    v_cache = torch.full((*shape, case.value_dim), torch.nan, dtype=dtype, device=device)
    for row, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        blocks, offsets = _slots(tables[row], torch.arange(length - new, device=device), case.block_size)
        k_cache[blocks, :, offsets] = normal(length - new, case.num_kv_heads, case.head_dim)
        v_cache[blocks, :, offsets] = normal(length - new, case.num_kv_heads, case.value_dim)
    options = {
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": normal(case.num_heads) if case.sinks else None,
    }
    query = normal(case.num_tokens, case.num_heads, case.head_dim)
    key = normal(case.num_tokens, case.num_kv_heads, case.head_dim)
    value = normal(case.num_tokens, case.num_kv_heads, case.value_dim)
    return Step(case, query, key, value, k_cache, v_cache, _metadata(case, tables), options)


def fresh(step: Step) -> Step:
    """The same step over caches of its own."""
    return replace(step, k_cache=step.k_cache.clone(), v_cache=step.v_cache.clone())


def attention_by_definition(step: Step) -> Tensor:
    """Attention of a step whose K and V are in the cache, ``[T, Hq, Dv]`` in float64, one sequence after the other."""
    case, out = step.case, []
    start = 0
    for row, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        blocks, offsets = _slots(step.meta.block_tables[row], torch.arange(length, device=step.query.device), case.block_size)
        key, value = (cache[blocks, :, offsets].double() for cache in (step.k_cache, step.v_cache))
        query = step.query[start : start + new].double()
        start += new
        out.append(_sequence_attention(query, key, value, case, step.options))
    return torch.cat(out)


def _sequence_attention(query: Tensor, key: Tensor, value: Tensor, case: Case, options: dict[str, Any]) -> Tensor:
    group = case.num_heads // case.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * options["scale"]
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    new, length = scores.shape[1:]
    position = torch.arange(length - new, length, device=query.device)[:, None]
    keys = torch.arange(length, device=query.device)[None, :]
    hidden = keys > position
    if case.window is not None:
        hidden |= keys <= position - case.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, options["sinks"].double()[:, None, None].expand(-1, new, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by the norm of the expected values; NaN if ``out`` has one."""
    return float((out.double() - expected).norm() / expected.norm())


def _slots(table: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    return table[positions // block_size].long(), positions % block_size


def _block_tables(case: Case, spare_blocks: int) -> Tensor:
    counts = [ceil_div(length, case.block_size) for length in case.seq_lens]
    order = torch.randperm(sum(counts) + spare_blocks, generator=torch.Generator().manual_seed(case.seed)).int()
    tables = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)  # a read past a table ends the test
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count
    return tables


def _metadata(case: Case, tables: Tensor) -> StepMetadata:
    device = tables.device
    starts = [0]
    slots, positions = [], []
    for row, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        starts.append(starts[-1] + new)
        position = torch.arange(length - new, length, device=device)
        blocks, offsets = _slots(tables[row], position, case.block_size)
        positions.append(position)
        slots.append(blocks * case.block_size + offsets)
    return StepMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
        num_decodes=case.num_decodes,
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
        block_size=case.block_size,
    )
