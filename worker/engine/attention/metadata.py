"""The metadata of one step for attention.

It is passed beside the model (`interface.paged_context`), not through its keyword arguments: some models drop them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class StepMetadata:
    """The ragged batch of one step: B sequences, T tokens; tensors on the model's device.

    Attributes:
        query_start_loc: ``[B+1]`` int32; the tokens of sequence i are ``query_start_loc[i] .. query_start_loc[i+1]-1``.
        seq_lens: ``[B]`` int32; tokens of each sequence after this step.
        block_tables: ``[B, max_blocks]`` int32; entries past a sequence's last block are undefined.
        slot_mapping: ``[T]`` int64; where K and V of each token go: ``block * block_size + offset``; negative: nowhere.
        positions: ``[T]`` int64, the tokens' positions in their sequences.
        num_decodes: this many sequences, the first ones, have exactly one token.
        max_query_len: most tokens of one sequence in this step.
        max_seq_len: greatest of ``seq_lens``.
        scratch: what a backend computes once per step and uses in every layer, under its own keys.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    positions: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    scratch: dict[Any, Any] = field(default_factory=dict)
