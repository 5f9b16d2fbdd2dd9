from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig, Qwen3Config

from producer.errors import ModelUnavailable
from producer.sampling import SamplingParams
from worker.cli_size import size as size_command
from worker.engine.attention.layers import AttentionLayer, discover_layers
from worker.engine.config import CUDA_GRAPH_BYTES
from worker.engine.device_sampler import sample_on_device
from worker.engine.kv_cache import block_bytes
from worker.engine.quantization import MOST_DEQUANTIZED, linear_int8, quantize_rows
from worker.engine.request import Request
from worker.sizing import CUDA_CONTEXT_BYTES, GIB, SAMPLING_BYTES, ModelShape, read_shape, size

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
QWEN_3_06B = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)


def saved(config: Any, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


# Parameters as the models' authors publish them; KV bytes by hand: layers * KV heads * 2 * head size * 2 bytes.
@pytest.mark.parametrize(
    ("config", "num_parameters", "kv_bytes_per_token"),
    [(LLAMA_3_8B, 8_030_261_248, 32 * 8 * 2 * 128 * 2), (QWEN_3_06B, 596_049_920, 28 * 8 * 2 * 128 * 2)],
    ids=["llama-3-8b", "qwen3-0.6b"],
)
def test_published_models_have_their_published_sizes(config: Any, num_parameters: int, kv_bytes_per_token: int, tmp_path: Path) -> None:
    shape = read_shape(saved(config, tmp_path))
    assert shape.num_parameters == num_parameters
    assert shape.kv_bytes_per_token(2) == kv_bytes_per_token


def test_demo_model_has_the_figures_of_its_weights_file() -> None:
    shape = read_shape("demo")
    assert shape.num_parameters == 134_515_008
    assert shape.kv_bytes_per_token(2) == 23_040
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.key_dim) == (30, 9, 3, 64)


def test_llama_3_8b_on_80_gib_by_hand(tmp_path: Path) -> None:
    sizing = size(read_shape(saved(LLAMA_3_8B, tmp_path)), 80 * GIB)
    assert sizing.weight_bytes == 16_060_522_496
    assert sizing.block_bytes == 16 * 131_072
    assert sizing.step_bytes == 2048 * 61_440 * 2 + 100 * 128_256 * 40
    assert sizing.num_blocks == int((80 * GIB - GIB // 2 - 16_060_522_496 - sizing.step_bytes - GIB // 2) * 0.9) // 2_097_152 == 29_182
    assert sizing.num_tokens == 466_912
    assert sizing.concurrency == {256: 100, 512: 100, 1024: 100, 2048: 100, 4096: 100, 8192: 56}


def test_concurrency_counts_whole_blocks() -> None:
    shape = ModelShape(
        num_parameters=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        key_dim=1,
        value_dim=1,
        hidden_size=1,
        intermediate_size=1,
        vocab_size=1,
        max_model_len=300,
    )
    sizing = size(shape, CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES + 100_000, max_batch_size=100, max_batch_tokens=1)
    blocks = int((100_000 - 2 - shape.step_bytes(2, 100, 1)) * 0.9) // 64
    assert sizing.num_blocks == blocks
    assert sizing.concurrency == {256: blocks // 16, 300: blocks // 19}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=99, n_positions=128),
        OPTConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, ffn_dim=64, vocab_size=99, word_embed_proj_dim=32),
        MixtralConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=64, vocab_size=99
        ),
    ],
    ids=["gpt2", "opt", "mixtral"],
)
def test_other_architectures_are_counted_as_they_are_loaded(config: Any, tmp_path: Path) -> None:
    shape = read_shape(saved(config, tmp_path))
    model = AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == model.num_parameters()
    layers = list(discover_layers(model.eval(), 64).values())
    assert shape.kv_bytes_per_token(4) * 16 == block_bytes(layers, 16, torch.float32)


@pytest.mark.parametrize(("config", "tied"), [(LLAMA_3_8B, False), (QWEN_3_06B, True)], ids=["llama-3-8b", "qwen3-0.6b"])
def test_int8_is_counted_as_it_is_stored(config: Any, tied: bool, tmp_path: Path) -> None:
    folder = saved(config, tmp_path)
    plain, int8 = (read_shape(folder, int8_weights=wanted) for wanted in (False, True))
    embedding = config.vocab_size * config.hidden_size
    norms = plain.num_parameters - int8.num_int8 - (0 if tied else embedding)
    assert 0 < norms < 400_000
    assert int8.weight_bytes(2) == int8.num_int8 + 2 * (int8.num_parameters - int8.num_int8 + (embedding if tied else 0))
    assert int8.kv_bytes_per_token(2, int8=True) == config.num_hidden_layers * 8 * 2 * (128 + 4)


@pytest.mark.parametrize(("dtype", "dtype_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=str)
def test_what_a_step_makes_numbers_of_int8_is_counted(dtype: torch.dtype, dtype_bytes: int, tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    plain, int8 = (read_shape(saved(config, tmp_path), int8_weights=wanted) for wanted in (False, True))
    codes, scale = quantize_rows(torch.ones(4096, 64))
    with MemoryPeak(beside=(codes, scale)) as peak:
        linear_int8(torch.ones(1, 64, dtype=dtype), codes, scale, None)
    counted = int8.step_bytes(dtype_bytes, 8, 64) - plain.step_bytes(dtype_bytes, 8, 64)
    assert counted == 4096 * 64 * (4 + (2 if dtype_bytes == 2 else 0))
    assert counted <= peak.num_bytes <= 1.1 * counted


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 40}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_choosing_tokens_takes_is_counted(dtype: torch.dtype, params: dict[str, Any]) -> None:
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    requests = [Request(str(row), [0], SamplingParams(**params), 1, seed=row) for row in range(20)]
    with MemoryPeak(beside=(logits,)) as peak:
        sample_on_device(logits, requests)
    assert 0.6 * SAMPLING_BYTES < peak.num_bytes / logits.numel() < 1.01 * SAMPLING_BYTES


def test_no_more_of_a_large_weight_is_made_numbers_at_once_than_the_engine_does(tmp_path: Path) -> None:
    assert read_shape(saved(LLAMA_3_8B, tmp_path), int8_weights=True).num_dequantized == MOST_DEQUANTIZED


class MemoryPeak(TorchDispatchMode):
    """``num_bytes``: most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self, beside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.num_bytes = 0
        self._beside = {tensor.untyped_storage().data_ptr() for tensor in beside}
        self._alive: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._beside:
                self._alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.num_bytes = max(self.num_bytes, sum(self._alive.values()))
        return out


def test_int8_is_counted_as_the_engine_counts_it() -> None:
    shape = read_shape("demo")
    layers = [
        AttentionLayer(
            name="a", num_heads=9, num_kv_heads=3, head_dim=64, value_dim=64, scale=1.0, window=None, softcap=None, has_sinks=False
        )
    ] * 30
    assert shape.kv_bytes_per_token(2, int8=True) * 16 == block_bytes(layers, 16, torch.int8)


def test_weights_that_the_engine_would_not_store_in_int8_are_not_counted_so(tmp_path: Path) -> None:
    config = MixtralConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=64)
    arguments = ["--model", saved(config, tmp_path), "--gpu-memory", "4GiB", "--quantization", "int8"]
    refused = CliRunner().invoke(size_command, arguments)
    assert refused.exit_code == 1
    assert "quantization int8: only" in refused.stderr


def test_the_cache_never_has_more_blocks_than_a_full_batch_of_full_contexts_can_use() -> None:
    sizing = size(read_shape("demo"), 80 * GIB, max_batch_size=10)
    assert sizing.num_tokens == 10 * 8192
    assert sizing.concurrency[8192] == 10


def test_memory_that_cannot_hold_the_model_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    shape = read_shape(saved(LLAMA_3_8B, tmp_path))
    with pytest.raises(ValueError, match=r"8\.0 GiB are too little: it takes (\d+\.\d) GiB") as refused:
        size(shape, 8 * GIB)
    needed = float(str(refused.value).split("takes ")[1].split()[0])
    assert size(shape, int((needed + 0.1) * GIB)).num_blocks >= 1


def test_unknown_model_is_a_typed_error() -> None:
    with pytest.raises(ModelUnavailable, match="no such folder"):
        read_shape("/nowhere/at/all")


def test_command_prints_a_table_and_json(tmp_path: Path) -> None:
    arguments = ["--model", saved(LLAMA_3_8B, tmp_path), "--gpu-memory", "80GiB"]
    table = CliRunner().invoke(size_command, arguments)
    assert table.exit_code == 0, table.output
    assert "8,030,261,248 parameters" in table.output
    assert "466,912 tokens of 128.0 KiB" in table.output
    said = json.loads(CliRunner().invoke(size_command, [*arguments, "--json"]).output)
    assert (said["num_blocks"], said["model"]["num_kv_heads"]) == (29_182, 8)


def test_command_refuses_on_stderr_with_exit_code_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(size_command, ["--model", saved(LLAMA_3_8B, tmp_path), "--gpu-memory", "4GiB"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "too little" in result.stderr
