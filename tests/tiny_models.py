"""Small models with random weights, one an architecture, whose logits are far apart, so that greedy decoding has few near ties."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 320
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
_ALTERNATING: dict[str, Any] = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, **_ALTERNATING},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "mistral": _SLIDING,
    "mixtral": {**_EXPERTS, **_SLIDING},
    "gemma2": {**_ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 16},
    "phi3": _SLIDING,
    "gpt2": {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48, "dropout": 0.0},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 0.5},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "gpt_oss": {**_EXPERTS, **_ALTERNATING},
    "deepseek_v3": {  # keys and values of different size
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model of an architecture, by transformers' name of its type, in evaluation mode."""
    options = {**_COMMON, **ARCHITECTURES.get(architecture, {}), **changes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options), attn_implementation="eager")
    return model.float().eval()
