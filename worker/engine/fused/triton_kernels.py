"""Triton kernels for what is between the matrix products of a decoder: norms with their residual sums, rotations with the cache
write, gated activations. Each reads and writes its tensors once; arithmetic is float32 whatever their dtype.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# Triton compiles these functions from their source; their arguments are device values that Python's types cannot describe.
# ruff: noqa: N803, PLR0913, PLR0917 - constexpr names are upper case by Triton's convention, a launch's state is its arguments

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    stream,
    delta,
    delta_norm,
    norm,
    normed,
    factor,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
):
    """``stream += factor * delta``, then ``normed = rms_norm(stream) * norm``; one row per program. Grid: (tokens,).

    ``stream``, ``delta``, ``normed`` are ``[T, WIDTH]``; ``norm`` and ``delta_norm`` ``[WIDTH]`` float32. With ``delta_norm``
    the delta is itself normed first.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, COLUMNS)
    mask = i < WIDTH
    x = tl.load(stream + row + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        d = tl.load(delta + row + i, mask=mask, other=0.0).to(tl.float32)
        if HAS_DELTA_NORM:
            d *= tl.rsqrt(tl.sum(d * d, 0) / WIDTH + eps) * tl.load(delta_norm + i, mask=mask, other=0.0)
        rounded = (x + factor * d).to(stream.dtype.element_ty)
        tl.store(stream + row + i, rounded, mask=mask)
        x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.load(norm + i, mask=mask, other=0.0)
    tl.store(normed + row + i, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def rotate_and_write_kernel(
    qkv,
    query,
    k_cache,
    v_cache,
    slot_mapping,
    positions,
    rope,
    norms,
    eps,
    k_block_stride,
    v_block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Norm and rotate the heads of Q and K; put Q into ``query`` and K and V into the cache. Grid: (tokens, Hq + 2 * Hkv).

    ``qkv`` is ``[T, (Hq + 2 * Hkv) * D]``, ``query`` ``[T, Hq, D]``; ``rope`` ``[positions, 2 * HALF]`` float32, cosines and sines of
    the first ``2 * HALF`` dims, which turn in pairs ``HALF`` apart; ``norms`` ``[2, D]`` float32, for Q and K. A negative slot is
    not written.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DIMS)
    mask = d < HEAD_DIM
    row = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    x = tl.load(row + d, mask=mask, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        values = x.to(tl.float32)
        turns = d < 2 * HALF
        other = tl.where(turns, tl.where(d < HALF, d + HALF, d - HALF), d)
        partner = tl.load(row + other, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORMS:
            norm = norms + tl.where(head < NUM_HEADS, 0, HEAD_DIM)
            inverse = tl.rsqrt(tl.sum(values * values, 0) / HEAD_DIM + eps)
            values *= inverse * tl.load(norm + d, mask=mask, other=0.0)
            partner *= inverse * tl.load(norm + other, mask=mask, other=0.0)
        if HALF > 0:
            angle = rope + tl.load(positions + token) * (2 * HALF) + tl.where(d < HALF, d, d - HALF)
            cosine = tl.load(angle, mask=turns, other=1.0)
            sine = tl.load(angle + HALF, mask=turns, other=0.0)
            values = values * cosine + tl.where(d < HALF, -partner, partner) * sine
        x = values.to(x.dtype)
    if head < NUM_HEADS:
        tl.store(query + (token * NUM_HEADS + head) * HEAD_DIM + d, x, mask=mask)
    else:
        slot = tl.load(slot_mapping + token)
        block = slot // BLOCK_SIZE
        if head < NUM_HEADS + NUM_KV_HEADS:
            place = ((head - NUM_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
            tl.store(k_cache + block * k_block_stride + place + d, x, mask=mask & (slot >= 0))
        else:
            place = ((head - NUM_HEADS - NUM_KV_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
            tl.store(v_cache + block * v_block_stride + place + d, x, mask=mask & (slot >= 0))


@triton.jit
def gated_activation_kernel(gate_up, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, IS_GELU: tl.constexpr):
    """``out = activation(gate) * up``: SiLU, or GELU by tanh. Grid: (tokens, WIDTH / COLUMNS).

    ``gate_up`` is ``[T, 2 * WIDTH]``, the gates first; ``out`` ``[T, WIDTH]``.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = i < WIDTH
    gate = tl.load(gate_up + token * (2 * WIDTH) + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + i, mask=mask, other=0.0)
    slope = gate
    if IS_GELU:  # (1 + tanh(z)) / 2 is the logistic function of 2z
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(up.dtype)
    tl.store(out + token * WIDTH + i, activated * up, mask=mask)
