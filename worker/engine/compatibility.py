"""Refuses models that this engine would run wrongly, by their configuration and their class.

What these do not show is found in `attention.layers`, from the arguments of the model's attention, and in `probe`, by numbers.
"""

from __future__ import annotations

from typing import Any

from producer.errors import ModelUnavailable

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})  # whose angles depend on the position alone
_LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
_ALIBI_MODELS = frozenset({"bloom", "mpt"})


def check_config(config: Any) -> None:
    """Refuse by the configuration of the text model.

    Raises:
        ModelUnavailable: the message says why.
    """
    for refused, reason in (
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder"),
        (getattr(config, "add_cross_attention", False), "it has cross-attention"),
        (getattr(config, "alibi", False) or config.model_type in _ALIBI_MODELS, "ALiBi biases are not supported"),
    ):
        if refused:
            raise refusal(config, reason)
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise refusal(config, f"its layers are of types that are not supported: {', '.join(sorted(unknown))}")
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise refusal(config, f"{rope_type} RoPE depends on the longest sequence of a batch: neighbours would change the output")
        if rope_type not in _ROPE_TYPES:
            raise refusal(config, f"{rope_type} RoPE is not known to depend on the position alone")


def check_architecture(config: Any, *, trust_remote_code: bool = False) -> None:
    """Refuse by the class that transformers makes of a configuration. A class in the model's own code is checked once it is loaded.

    Raises:
        ModelUnavailable: the message says why.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if trust_remote_code and getattr(config, "auto_map", None):
        return
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise refusal(config, "transformers makes no causal language model of it")
    check_class(classes[type(config)], config)


def check_class(model_class: type, config: Any) -> None:
    """Refuse by the model's class.

    Raises:
        ModelUnavailable: the message says why.
    """
    if getattr(model_class, "_is_stateful", False):
        raise refusal(config, "it keeps a recurrent state, which the KV cache does not hold")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise refusal(config, "its attention does not go through transformers' AttentionInterface")


def _rope_types(config: Any) -> set[str]:
    """The types in the rope parameters, which may be nested by layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(name) for part in parts if (name := part.get("rope_type") or part.get("type"))}


def refusal(config: Any, reason: str) -> ModelUnavailable:
    """The error that refuses a model of this configuration."""
    return ModelUnavailable(f"model type {config.model_type} is refused: {reason}")
