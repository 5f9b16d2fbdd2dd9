"""What must not run does not load, and the message says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from producer.errors import ModelUnavailable
from tests.tiny_engine import tiny_runner
from tests.tiny_models import tiny_model
from worker.engine.attention.interface import AttentionBackend
from worker.engine.attention.layers import discover_layers
from worker.engine.attention.torch_backend import attend
from worker.engine.compatibility import check_class, check_config
from worker.engine.model_loader import prepare_model
from worker.engine.model_runner import ModelRunner

ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mamba", {}, "linear_attention"),
        ("jamba", {}, "linear_attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("falcon_h1", {}, "hybrid"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("llama4_text", {}, "chunked_attention"),
        ("phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0}}, "longrope RoPE"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "dynamic RoPE"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "novel"}}, "novel RoPE"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_type": "dynamic"}}},
            "dynamic RoPE",
        ),
    ],
)
def test_configurations_that_would_run_wrongly_are_refused(model_type: str, options: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(model_type)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ModelUnavailable, match=f"model type {model_type} is refused: .*{reason}"):
        check_config(config)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rope_whose_angles_depend_on_the_position_alone_is_accepted(rope_type: str) -> None:
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {**ROPE, "rope_type": rope_type}
    check_config(config)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"_is_stateful": True, "_supports_attention_backend": True}, "recurrent state"),
        ({"_supports_attention_backend": False}, "AttentionInterface"),
    ],
)
def test_classes_that_do_not_serve_are_refused(attributes: dict[str, bool], reason: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelUnavailable, match=reason):
        check_class(type("Changed", (type(model),), attributes), model.config)


@pytest.mark.parametrize(
    ("model_type", "reason"), [("diffllama", "attends twice"), ("doge", "a mask of the model's own making"), ("xglm", "AttentionInterface")]
)
def test_models_with_attention_of_their_own_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        runner_of(tiny_model(model_type))


def runner_of(model: PreTrainedModel, **settings: Any) -> ModelRunner:
    return tiny_runner(prepare_model(model, None, "tiny"), **settings)


@pytest.mark.parametrize("window", [7, 9, None])
def test_a_window_other_than_that_of_the_layers_mask_is_refused(window: int | None) -> None:
    model = tiny_model("gemma2")
    model.model.layers[2].self_attn.sliding_window = window
    with pytest.raises(ModelUnavailable, match=r"layers\.2\.self_attn does not see what a causal window of"):
        discover_layers(model, 512)


def test_a_window_too_long_to_try_is_still_compared() -> None:
    model = tiny_model("gemma2", sliding_window=4096)
    discover_layers(model, 1 << 15)
    model.model.layers[0].self_attn.sliding_window = 4097
    with pytest.raises(ModelUnavailable, match="does not see what a causal window of 4097"):
        discover_layers(model, 1 << 15)


def test_attention_arguments_that_nobody_honours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **kwargs: forward(*args, **kwargs, position_bias=torch.zeros(1)))
    with pytest.raises(ModelUnavailable, match="not supported: position_bias"):
        discover_layers(model, 512)


def test_a_model_that_needs_more_than_tokens_and_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model, "forward", lambda: None)
    with pytest.raises(ModelUnavailable, match="does not run on token ids and positions alone"):
        discover_layers(model, 512)
    assert model.config._attn_implementation == "eager"


def test_attention_that_is_not_causal_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[3].self_attn.is_causal = False
    with pytest.raises(ModelUnavailable, match="not causal"):
        discover_layers(model, 512)


def test_layers_are_described_as_they_are_called() -> None:
    layers = list(discover_layers(tiny_model("gpt_oss", head_dim=24), 512).values())
    assert [layer.name for layer in layers] == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert [layer.window for layer in layers] == [8, None, 8, None]
    assert {(a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim, a.softcap, a.has_sinks) for a in layers} == {(4, 2, 24, 24, None, True)}
    assert {layer.scale for layer in layers} == {24**-0.5}


def broken(**changes: Any) -> AttentionBackend:
    """The reference backend, but called with other options."""

    def call(*args: Any, **options: Any) -> Tensor:
        return attend(*args, **options | {name: change(options[name]) for name, change in changes.items()})

    return call


def of_the_wrong_sequence(query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, meta: Any, **options: Any) -> Tensor:
    return attend(query, key, value, k_cache, v_cache, replace(meta, block_tables=meta.block_tables.flip(0), scratch={}), **options)


def forgetting_decodes(query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, meta: Any, **options: Any) -> Tensor:
    meta.slot_mapping[: meta.num_decodes] = -1
    return attend(query, key, value, k_cache, v_cache, meta, **options)


BREAKS: dict[str, tuple[str, AttentionBackend]] = {
    "window one longer": ("mistral", broken(window=lambda window: window + 1)),
    "window one shorter": ("gemma2", broken(window=lambda window: window and window - 1)),
    "no window": ("gemma3_text", broken(window=lambda _: None)),
    "another scale": ("llama", broken(scale=lambda scale: scale * 1.1)),
    "no soft cap": ("gemma2", broken(softcap=lambda _: None)),
    "no sinks": ("gpt_oss", broken(sinks=lambda _: None)),
    "another sequence's blocks": ("qwen3", of_the_wrong_sequence),
    "decodes not written": ("opt", forgetting_decodes),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_numbers_catch_a_broken_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, backend = BREAKS[name]
    model = tiny_model(architecture)
    if architecture == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(2.0)
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: attend)
    runner_of(model)
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: backend)
    with pytest.raises(ModelUnavailable, match="its logits differ by"):
        runner_of(model)


@pytest.mark.parametrize("name", ["no window", "no sinks", "another sequence's blocks", "decodes not written"])
def test_rounding_of_bfloat16_is_told_from_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, backend = BREAKS[name]
    model = tiny_model(architecture).to(torch.bfloat16)
    runner_of(model)
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: backend)
    with pytest.raises(ModelUnavailable, match="its logits differ by"):
        runner_of(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 1},
        {"num_blocks": 2},
        {"num_blocks": 3},
        {"max_batch_size": 1, "max_batch_tokens": 1},
        {"max_batch_size": 2, "max_batch_tokens": 2},
        {"max_batch_size": 2, "max_batch_tokens": 7, "block_size": 1, "num_blocks": 50},
        {"block_size": 256},
    ],
)
def test_the_probe_fits_into_any_engine(settings: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    runner_of(tiny_model("llama"), **settings)
    monkeypatch.setattr("worker.engine.kernels.choose_backend", lambda *_: broken(scale=lambda scale: scale * 1.1))
    with pytest.raises(ModelUnavailable, match="its logits differ by"):
        runner_of(tiny_model("llama"), **settings)
