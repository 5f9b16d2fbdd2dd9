"""Writes a model of a known shape with random weights, for benchmarks on a machine to which no model can be brought.

    python -m ops.bench.random_model /tmp/llama-8b --like llama-8b

A step takes as long as the real model's; the text means nothing. The weights are a function of the seed, the device and torch's version.
Needs only torch and transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SHAPES: dict[str, dict[str, Any]] = {  # both have all token ids of the shipped sets
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
EOS = "</s>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write it; made if it is missing")
    parser.add_argument("--like", choices=SHAPES, default="smollm2-135m", help="whose shape it has (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    arguments = parser.parse_args()
    write_model(arguments.folder, SHAPES[arguments.like], arguments.seed)


def write_model(folder: Path, shape: dict[str, Any], seed: int = 0) -> None:
    """Write configuration, weights in bfloat16, and a tokenizer; made on the GPU if there is one, which takes seconds."""
    special = {"bos_token_id": None, "eos_token_id": shape["vocab_size"] - 1, "pad_token_id": None}
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **special), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(shape["vocab_size"]).save_pretrained(folder)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Ids 0-255 stand for bytes, so that any text has tokens; the others, which no text has, each for a word; the last is EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(len(alphabet), vocab_size - 1)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words, EOS])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


if __name__ == "__main__":
    main()
