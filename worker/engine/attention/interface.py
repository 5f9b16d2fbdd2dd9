"""The attention function that transformers' models call, and the layers it knows.

Registered under our own name in `transformers.AttentionInterface`. No mask function is registered under that name, so models
build no mask (transformers' way for backends that need none).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.attention.metadata import StepMetadata

NAME = "headrace"


class AttentionBackend(Protocol):
    """Writes this step's K and V into the paged cache, then attends to it.

    A query at position p sees the keys j of its own sequence with ``j <= p`` and, with a window, ``j > p - window``.

    Args:
        query: ``[T, Hq, D]``; key ``[T, Hkv, D]``; value ``[T, Hkv, Dv]``; tokens and heads may be strided.
        k_cache: ``[num_blocks, Hkv, block_size, D]``; v_cache likewise with ``Dv``. How a backend arranges the inside of one
            (block, head) is up to it; any code may copy whole blocks. An int8 cache has rows of ``D + 4`` bytes: the codes and the
            scale per token and head (`quantization`).
        scale: factor on the scores.
        window: keys that a query sees, including its own; None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[Hq]``, one more logit per head in the softmax's sum.

    Returns:
        ``[T, Hq, Dv]``.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: StepMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What the attention function uses besides its arguments while a step runs; ``caches`` holds each module's (K, V)."""

    meta: StepMetadata
    backend: AttentionBackend
    caches: Mapping[nn.Module, tuple[Tensor, Tensor]]


_context: ContextVar[PagedContext] = ContextVar("paged_context")


@contextmanager
def paged_context(context: PagedContext) -> Iterator[None]:
    """Set the context of the forward pass within; each thread has its own, so two engines may be in one process."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> PagedContext:
    """The context of the step that runs in this thread."""
    context = _context.get(None)
    assert context is not None, "attention outside of a step"
    return context


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Within this, a transformers model computes attention by the function registered under ``name``."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: query ``[1, Hq, T, D]``, key ``[1, Hkv, T, D]``, value ``[1, Hkv, T, Dv]`` to ``[1, T, Hq, Dv]``."""
    context = current_context()
    assert attention_mask is None, "a mask was built for paged attention"
    k_cache, v_cache = context.caches[module]
    out = context.backend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        k_cache,
        v_cache,
        context.meta,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
