"""Sampling noise without a generator: a function of only (seed, position, token id).

A draw never depends on earlier draws, so it is the same whatever other requests are in the batch, and after
preemption or on another worker (counter-based random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
The bit mixer is SplitMix64's (Steele, Lea and Flood 2014). The logits to which it is added may differ slightly: attention splits
long sequences by the work in the step, so their last bits depend on it, and if two tokens are nearly tied either may win.
"""

from __future__ import annotations

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
TAIL_TOKEN = -1  # stands for "all other tokens" when they compete as one


def row_key(seed: int, position: int) -> int:
    """The key of one draw, a signed 64-bit integer.

    Args:
        seed: any integer; only its low 64 bits count.
        position: of the token that is drawn, in prompt + output.
    """
    key = _mix_int(_mix_int(seed & _MASK) + position * _GOLDEN & _MASK)
    return key - 2**64 if key >= 2**63 else key


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        keys: [N] int64, from `row_key`.
        token_ids: [N] int64.

    Returns:
        [N] float32, between -2.9 and 22.9. Element i depends only on ``keys[i]`` and ``token_ids[i]``.
    """
    bits = _mix(keys + token_ids * _signed(_GOLDEN)) >> 32 & 0xFFFFFFFF
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(E) of an exponential E; small E, which win, keep their precision


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    shifted: torch.Tensor = x >> bits & 2 ** (64 - bits) - 1
    return shifted


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
