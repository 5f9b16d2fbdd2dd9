"""Recognises the decoders that the native step computes: Llama's structure and its relatives.

Nothing is guessed: the model must be one of transformers' own classes named here, every parameter must have a place in the
structure, and every size must be one that the kernels serve. The result is still compared with the model itself
before it serves (`decoder`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.attention.layers import AttentionLayer
from worker.engine.quantization import Int8Linear, Linear

ARCHITECTURES = {
    f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Gemma", "Gemma2", "Gemma3")
}
_PARAMETER = re.compile(
    r"self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.(weight|bias)"
    r"|(input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight"
)
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
_MAX_ROPE_BYTES = 1 << 28


class NotRecognised(Exception):
    """The native step does not serve this model; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerStructure:
    """One decoder layer: its modules, and what its attention is called with."""

    attention: AttentionLayer
    qkv: tuple[Linear, Linear, Linear]
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    attn_norm: Tensor
    mlp_norm: Tensor
    attn_out_norm: Tensor | None
    mlp_out_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    rope: Tensor | None  # [positions, 2 * half] float32: cosines, then sines


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStructure:
    """A whole decoder; norms are float32 factors, including whatever the model adds to its weights."""

    layers: list[LayerStructure]
    embedding: Tensor
    head: Linear
    final_norm: Tensor
    norm_eps: float
    activation: str
    embedding_factor: float
    residual_factor: float
    logits_factor: float
    logits_softcap: float | None
    rotary_dim: int


def recognise(
    model: Any,
    config: Any,
    attention: Sequence[AttentionLayer],
    max_positions: int,
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16}),
    multiple: int = 32,
) -> DecoderStructure:
    """The structure of a transformers ``...ForCausalLM``.

    Args:
        config: of the text model.
        attention: of each layer, in order.
        max_positions: the longest context; rotations are tabled up to it.
        dtypes: that the kernels serve.
        multiple: the sizes of the matrices must be multiples of this.

    Raises:
        NotRecognised: it is not one that the kernels compute.
    """
    _require(type(model).__name__ in ARCHITECTURES, f"{type(model).__name__} is not a known architecture")
    _require(type(model).__module__.startswith("transformers.models."), "its code is not transformers' own")
    _require(model.dtype in dtypes, f"its dtype is {model.dtype}")
    base = model.model
    ropes = _Ropes(base, max_positions)
    eps = float(config.rms_norm_eps)
    layers = [_layer(module, attention[i], ropes.table(module, config, i), eps) for i, module in enumerate(base.layers)]
    structure = DecoderStructure(
        layers=layers,
        embedding=base.embed_tokens.weight.detach(),
        head=_linear(model.lm_head),
        final_norm=_norm(base.norm, eps),
        norm_eps=eps,
        activation=getattr(config, "hidden_activation", None) or config.hidden_act,
        embedding_factor=_embedding_factor(base.embed_tokens, config),
        residual_factor=float(getattr(config, "residual_multiplier", 1.0)),
        logits_factor=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
        rotary_dim=ropes.rotary_dim,
    )
    _check_sizes(structure, multiple)
    return structure


def _layer(module: Any, attention: AttentionLayer, rope: Tensor | None, eps: float) -> LayerStructure:
    unknown = [name for name, _ in module.named_parameters() if not _PARAMETER.fullmatch(name)]
    _require(not unknown, f"{attention.name} has parameters of an unknown kind: {', '.join(unknown)}")
    _require(not attention.has_sinks, "it has attention sinks")
    block, mlp = module.self_attn, module.mlp
    sandwiched = hasattr(module, "pre_feedforward_layernorm")
    return LayerStructure(
        attention=attention,
        qkv=(_linear(block.q_proj), _linear(block.k_proj), _linear(block.v_proj)),
        o=_linear(block.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        attn_norm=_norm(module.input_layernorm, eps),
        mlp_norm=_norm(module.pre_feedforward_layernorm if sandwiched else module.post_attention_layernorm, eps),
        attn_out_norm=_norm(module.post_attention_layernorm, eps) if sandwiched else None,
        mlp_out_norm=_norm(module.post_feedforward_layernorm, eps) if sandwiched else None,
        q_norm=_norm(block.q_norm, eps) if hasattr(block, "q_norm") else None,
        k_norm=_norm(block.k_norm, eps) if hasattr(block, "k_norm") else None,
        rope=rope,
    )


def _linear(module: Any) -> Linear:
    _require(type(module) in (nn.Linear, Int8Linear), f"a linear layer is a {type(module).__name__}")
    assert isinstance(module, Linear)
    return module


def _norm(module: Any, eps: float) -> Tensor:
    """The norm's factors, found by norming a row of ones: some models store the weight minus one."""
    ones = torch.ones(module.weight.shape[0], dtype=torch.float32, device=module.weight.device)
    factors: Tensor = (module(ones) * (1.0 + eps) ** 0.5).float().contiguous()
    return factors


def _embedding_factor(embedding: Any, config: Any) -> float:
    scale = getattr(embedding, "embed_scale", None)
    factor = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    return factor * float(getattr(config, "embedding_multiplier", 1.0))


class _Ropes:
    """Tables of the model's rotations, one for each of its kinds of layer."""

    def __init__(self, base: Any, max_positions: int) -> None:
        self.rotary_dim = 0
        self._rotary = base.rotary_emb
        self._device = base.embed_tokens.weight.device
        self._max_positions = max_positions
        self._tables: dict[str | None, Tensor] = {}

    def table(self, module: Any, config: Any, index: int) -> Tensor | None:
        """``[positions, 2 * half]`` of a layer, or None if it rotates nothing."""
        if not getattr(module.self_attn, "use_rope", True):
            return None
        kind = config.layer_types[index] if hasattr(self._rotary, "layer_types") else None
        if kind not in self._tables:
            self._tables[kind] = self._make(kind)
        return self._tables[kind]

    def _make(self, kind: str | None) -> Tensor:
        positions = torch.arange(self._max_positions, device=self._device)[None]
        of_dtype = torch.ones(1, dtype=torch.float32, device=self._device)
        cosines, sines = self._rotary(of_dtype, positions, *([kind] if kind else []))
        half = cosines.shape[-1] // 2
        _require(self._max_positions * half * 8 <= _MAX_ROPE_BYTES, "its context is too long for a table of rotations")
        _require(self.rotary_dim in (0, 2 * half), "its layers rotate different numbers of dims")
        halves = torch.equal(cosines[..., :half], cosines[..., half:]) and torch.equal(sines[..., :half], sines[..., half:])
        _require(halves, "it rotates dims that do not lie half a head apart")
        self.rotary_dim = 2 * half
        return torch.cat([cosines[0, :, :half], sines[0, :, :half]], -1).float().contiguous()


def _check_sizes(structure: DecoderStructure, multiple: int) -> None:
    first = structure.layers[0]
    hidden = structure.embedding.shape[1]
    a = first.attention
    shapes = {_shape(layer) for layer in structure.layers}
    _require(len(shapes) == 1, "its layers differ in shape")
    _require(len({layer.attn_out_norm is None for layer in structure.layers}) == 1, "its layers differ in norms")
    _require(structure.activation in ACTIVATIONS, f"its activation is {structure.activation}")
    _require(a.head_dim == a.value_dim, "its keys and values differ in size")
    _require(structure.rotary_dim <= a.head_dim, "it rotates more dims than a head has")
    qkv = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    for name, size in (("hidden", hidden), ("intermediate", first.gate.out_features), ("heads", a.num_heads * a.head_dim), ("qkv", qkv)):
        _require(size % multiple == 0, f"its {name} size, {size}, is not a multiple of {multiple}")


def _shape(layer: LayerStructure) -> tuple[int, ...]:
    a = layer.attention
    return a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim, layer.gate.out_features, layer.down.out_features


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotRecognised(reason)
