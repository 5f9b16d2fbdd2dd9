"""Finds a model's attention layers by watching one call of it, and refuses attention that the paged backends do not compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from worker.engine.attention.interface import attention_implementation
from worker.engine.compatibility import refusal

_MASKED = "headrace-discovery"  # a mask function is registered under this name, and none under the other
_UNMASKED = "headrace-profile"
_registered = threading.Lock()  # held while a thread's own function is registered under the first
_HONOURED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
# Arguments to attention that it may ignore: they say how to compute, or repeat what the metadata says.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> visible, transformers' form


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention module's shapes and options, as its calls show them.

    Attributes:
        window: keys that a query sees, including its own; None for all.
        softcap: of the scores; None for none.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@torch.inference_mode()
def discover_layers(model: Any, max_model_len: int) -> dict[nn.Module, AttentionLayer]:
    """The attention modules of a model, in the order in which it calls them, found by running two tokens through it.

    What a query may see is read from the mask function that the model builds for its own attention, and must agree with the window
    in the layer's arguments, so a wrong window is found however long it is.

    Args:
        max_model_len: masks are compared up to this length.

    Raises:
        ModelUnavailable: the attention is of a kind that the paged backends do not compute; the message says what.
    """
    watch = _Watch(model, max_model_len)
    with _registered:
        AttentionMaskInterface.register(_MASKED, watch.mask)
        try:
            _run(model, _MASKED, watch.attention, torch.arange(2), 1)
        except (TypeError, ValueError) as error:
            reason = f"it does not run on token ids and positions alone ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            raise refusal(model.config, reason) from error
        finally:
            AttentionMaskInterface.register(_MASKED, _no_mask)
    if not watch.layers:
        raise refusal(model.config, "it has no attention layer that goes through transformers' AttentionInterface")
    return watch.layers


@torch.inference_mode()
def run_without_attention(model: Any, num_tokens: int, num_logits: int, max_model_len: int) -> Tensor:
    """Run a step of ``num_tokens`` tokens that attend to nothing; returns its logits, ``[num_logits, vocab]``."""
    return _run(model, _UNMASKED, _attend_to_nothing, torch.arange(num_tokens) % max_model_len, num_logits)


def _run(model: Any, name: str, attention: Callable[..., Any], positions: Tensor, num_logits: int) -> Tensor:
    """Logits of the first tokens, with another attention function."""
    AttentionInterface.register(name, attention)
    positions = positions.to(model.device)
    tokens = torch.zeros_like(positions)
    rows = torch.arange(num_logits, device=model.device)
    try:
        with attention_implementation(model, name):
            output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    finally:
        AttentionInterface.register(name, _attend_to_nothing)  # the function registered before may hold the model
    logits: Tensor = output.logits[0]
    return logits


def _attend_to_nothing(_module: nn.Module, query: Tensor, _key: Tensor, value: Tensor, _mask: Any, **_: Any) -> tuple[Tensor, None]:
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _no_mask(**_: Any) -> None:
    return None


class _Watch:
    """Replaces attention and mask functions during one call, and records what they are given."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.layers: dict[nn.Module, AttentionLayer] = {}
        self._config = model.config
        self._max_model_len = max_model_len
        self._names = {module: name for name, module in model.named_modules()}
        self._mask_functions: dict[int, tuple[Tensor, MaskFunction]] = {}  # by the mask's id(), which stays unique because the mask is kept

    def mask(self, *, mask_function: MaskFunction, device: torch.device, **_: Any) -> Tensor:
        """transformers' mask signature."""
        mask = torch.zeros(1, 1, 1, 1, device=device)
        self._mask_functions[id(mask)] = mask, mask_function
        return mask

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """transformers' attention signature; attends to nothing."""
        if module in self.layers:
            raise refusal(self._config, f"{self._names[module]} attends twice in one forward, so one KV cache would not do")
        self._check_options(module, options)
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise refusal(self._config, f"{query.shape[1]} query heads do not share {key.shape[1]} key and {value.shape[1]} value heads")
        layer = AttentionLayer(
            name=self._names[module],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if options.get("scaling") is None else options["scaling"]),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
        )
        self._check_mask(layer, attention_mask)
        self.layers[module] = layer
        return _attend_to_nothing(module, query, key, value, attention_mask)

    def _check_options(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise refusal(self._config, "its attention is not causal")
        given = {name for name, value in options.items() if value is not None and name not in ("is_causal", "dropout")}
        unknown = given - _HONOURED - _HARMLESS
        if unknown or options.get("dropout"):
            raise refusal(self._config, f"its attention takes arguments that are not supported: {', '.join(sorted(unknown)) or 'dropout'}")

    def _check_mask(self, layer: AttentionLayer, mask: Tensor | None) -> None:
        """Compare whole rows of the layer's own mask with the window's, on both sides of the window's edge and at the longest context."""
        _, function = self._mask_functions.get(id(mask), (None, None))
        if function is None:
            raise refusal(self._config, f"{layer.name} is given a mask of the model's own making")
        window = layer.window or 0
        for query in {7, window + 1, 2 * window + 7, min(self._max_model_len, 1 << 17) - 1}:
            keys = torch.arange(query + 3)
            seen = function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
            expected = keys <= query
            if layer.window is not None:
                expected &= keys > query - layer.window
            if not torch.equal(seen.expand_as(expected), expected):
                raise refusal(self._config, f"{layer.name} does not see what a causal window of {layer.window or 'any length'} lets it see")
