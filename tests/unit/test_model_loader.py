from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producer.errors import ModelUnavailable
from tests.tiny_models import VOCAB_SIZE, tiny_model
from worker.engine.attention import interface
from worker.engine.config import EngineConfig
from worker.engine.model_loader import check_model, choose_device, choose_dtype, load_model, local_model_path, prepare_model, runs_natively
from worker.engine.quantization import Int8Linear
from worker.engine.text_decoder import Vocabulary

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, BYTES[0] + BYTES[1], BYTES[2] + BYTES[3], "<end>"]
END = len(TOKENS) - 1


def write_gguf(file: Path) -> None:
    """A Llama of one layer with random weights and a tokenizer of single bytes."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(TOKENS) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges([f"{BYTES[0]} {BYTES[1]}", f"{BYTES[2]} {BYTES[3]}"])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    shapes |= {"ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24), "attn_norm": (16,), "ffn_norm": (16,)}
    names = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    names |= {"token_embd.weight": (len(TOKENS), 16), "output_norm.weight": (16,), "output.weight": (len(TOKENS), 16)}
    for name, shape in names.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny-llama")
    byte_tokenizer().save_pretrained(tmp_path / "tiny-llama")
    return tmp_path / "tiny-llama"


def test_a_gguf_file_is_converted_quietly_once_and_found_again(gguf_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(EngineConfig(model=str(gguf_file), dtype="float32"))
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.max_model_len, loaded.vocab_size) == ("tiny", 64, len(TOKENS))
    assert loaded.eos_token_ids == {END}
    assert Vocabulary(loaded.tokenizer).is_byte_level, "whatever the version of transformers puts before its decoder"
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi"
    assert loaded.tokenizer.decode(loaded.tokenizer("Grüße")["input_ids"]) == "Grüße"
    (made,) = (cache / "models").iterdir()
    (made / "mark").touch()
    assert local_model_path(str(gguf_file)) == str(made)
    assert (made / "mark").exists()


def test_another_file_in_its_place_is_converted_anew(gguf_file: Path, cache: Path) -> None:
    before = local_model_path(str(gguf_file))
    os.utime(gguf_file, ns=(1, 1))
    assert local_model_path(str(gguf_file)) != before
    assert len(list((cache / "models").iterdir())) == 2


def test_a_file_may_be_converted_twice_at_once(gguf_file: Path, cache: Path) -> None:
    together = Barrier(2)

    def convert(_: int) -> str:
        together.wait()
        return local_model_path(str(gguf_file))

    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(convert, range(2)))
    assert found == {str(path) for path in (cache / "models").iterdir()}
    assert load_model(EngineConfig(model=str(gguf_file))).vocab_size == len(TOKENS)
    assert torch.get_default_dtype() == torch.float32


def test_a_broken_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf"):
        local_model_path(str(file))
    assert list((cache / "models").iterdir()) == []


def test_a_folder_loads(folder: Path) -> None:
    loaded = load_model(EngineConfig(model=str(folder), dtype="bfloat16", device="cpu", max_model_len=100))
    assert (loaded.name, loaded.dtype, loaded.max_model_len, loaded.vocab_size) == ("tiny-llama", torch.bfloat16, 100, 320)
    assert loaded.model.config._attn_implementation == interface.NAME
    assert not loaded.model.training
    assert loaded.eos_token_ids == frozenset()


def test_weights_are_quantised_where_that_is_asked_for(folder: Path) -> None:
    loaded = load_model(EngineConfig(model=str(folder), quantization="int8", dtype="bfloat16", device="cpu"))
    assert isinstance(loaded.model.lm_head, Int8Linear)
    assert isinstance(loaded.model.model.layers[0].self_attn.k_proj, Int8Linear)
    assert (loaded.dtype, loaded.vocab_size) == (torch.bfloat16, loaded.config.vocab_size)


def test_the_context_is_never_longer_than_the_models(folder: Path) -> None:
    assert load_model(EngineConfig(model=str(folder), max_model_len=10**6)).max_model_len == 512


@pytest.mark.parametrize(
    ("value", "tokenizer_value", "expected"),
    [(3, None, {3}), ([4, 5], None, {4, 5}), (None, 6, {6}), ([4, 5], 6, {4, 5, 6}), ([4, VOCAB_SIZE, -1], None, {4})],
)
def test_tokens_that_end_an_output_come_from_wherever_they_are_named(value: Any, tokenizer_value: int | None, expected: set[int]) -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    model.generation_config.eos_token_id = value
    if tokenizer_value is not None:
        tokenizer.eos_token = BYTES[tokenizer_value]
    assert prepare_model(model, tokenizer, "tiny").eos_token_ids == expected


def test_a_model_that_would_run_wrongly_is_refused_before_its_weights_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="dynamic RoPE"):
        load_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "/no/such/folder"}, "no such folder"),
        ({"model": "./nothing"}, "no such folder"),
        ({"model": "nothing.gguf"}, "no such file"),
        ({"model": "nobody/nothing"}, "nobody/nothing"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "cuda:9"}, "device cuda:9"),
        ({"dtype": "int3"}, "dtype 'int3'"),
    ],
)
def test_what_is_not_there_is_named(settings: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match=reason):
        load_model(EngineConfig(**settings))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=str(tmp_path)):
        load_model(EngineConfig(model=str(tmp_path)))


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors"):
        load_model(EngineConfig(model=str(folder)))


def test_automatic_choices() -> None:
    device = choose_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_dtype("auto", device) in (torch.bfloat16, torch.float32)
    assert choose_dtype("float16", device) == torch.float16


@pytest.mark.parametrize(
    ("isa", "architecture", "settings", "dtype"),
    [
        ("avx2", "LlamaForCausalLM", {}, torch.bfloat16),
        ("avx2", "LlamaForCausalLM", {"block_size": 48, "kv_dtype": "int8"}, torch.bfloat16),
        ("avx2", "OPTForCausalLM", {}, torch.float32),  # its own modules would compute in a dtype that the CPU does not
        ("avx2", "LlamaForCausalLM", {"attention": "torch"}, torch.float32),  # and so here
        ("avx2", "LlamaForCausalLM", {"block_size": 24}, torch.float32),
        ("portable", "LlamaForCausalLM", {}, torch.float32),
        (None, "LlamaForCausalLM", {}, torch.float32),
    ],
)
def test_without_bfloat16_instructions_it_is_taken_where_our_kernels_run_the_model(
    isa: str | None, architecture: str, settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = None if isa is None else SimpleNamespace(headrace_isa=isa.encode)
    monkeypatch.setattr("worker.engine.model_loader.kernels", lambda: lib)
    monkeypatch.setattr("worker.engine.model_loader.computes_bfloat16", lambda _: False)
    device = torch.device("cpu")
    natively = runs_natively(EngineConfig(**settings), device, [architecture])
    assert choose_dtype("auto", device, natively=natively) == dtype


def without_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def of_an_encoder(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')


def with_dynamic_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_a_shard_too_few(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def copied_half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = (without_config, of_an_encoder, with_dynamic_rope, without_tokenizer, without_weights, with_a_shard_too_few, copied_half)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_cannot_be_loaded_is_refused_without_loading_it(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(ModelUnavailable):
        check_model(EngineConfig(model=str(folder)))


def test_files_beside_the_weights_are_not_the_models(folder: Path) -> None:
    (folder / "adapter.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    check_model(EngineConfig(model=str(folder)))


def test_what_can_be_loaded_passes_the_check(folder: Path, gguf_file: Path, cache: Path) -> None:
    check_model(EngineConfig(model=str(folder)))
    check_model(EngineConfig(model=str(gguf_file)))
    assert not cache.exists(), "nothing is converted by looking"
    load_model(EngineConfig(model=str(gguf_file)))
    check_model(EngineConfig(model=str(gguf_file)))
    for missing in (folder / "none", gguf_file.with_name("none.gguf")):
        with pytest.raises(ModelUnavailable, match="no such"):
            check_model(EngineConfig(model=str(missing)))
