from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.instruction_sets import INSTRUCTION_SETS, kernels_for
from tests.paged_attention import Case, make_step
from tests.tiny_models import VOCAB_SIZE, tiny_model
from worker.engine.attention.layers import discover_layers
from worker.engine.fused.decoder import FusedDecoder, fuse
from worker.engine.fused.packing import pack, pack_interleaved
from worker.engine.fused.structure import NotRecognised, recognise
from worker.engine.kv_cache import KVCache
from worker.engine.native.library import kernels
from worker.engine.quantization import quantize_linears, stored_weight

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": VOCAB_SIZE + 5},
    "llama, deep products": {"hidden_size": 768, "intermediate_size": 1600, "num_hidden_layers": 2, "initializer_range": 0.03},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "granite": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 20.0},
    "gemma3_text": {},
}
ROUNDS = (
    Case(query_lens=(1, 20), seq_lens=(1, 20)),
    Case(query_lens=(1, 30), seq_lens=(2, 50)),
    Case(query_lens=(1, 1), seq_lens=(3, 51)),
    Case(query_lens=(1, 205), seq_lens=(4, 256)),
)


def make_model(name: str) -> Any:
    return tiny_model(name.split(maxsplit=1)[0].rstrip(","), **{**SIZES, **ARCHITECTURES[name]}).bfloat16()


def make_decoder(model: Any, num_blocks: int = 40, cache_dtype: torch.dtype = torch.bfloat16) -> FusedDecoder:
    layers = list(discover_layers(model, 512).values())
    caches = KVCache(layers, num_blocks, 16, cache_dtype, torch.device("cpu")).layers
    decoder = fuse(model, model.config, layers, 512)
    assert decoder is not None
    decoder.bind(caches)
    return decoder


def own_logits(model: Any, token_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and last hidden states of a whole sequence by the model's own modules."""
    exact = copy.deepcopy(model)
    if dtype != model.dtype:
        exact.to(dtype)
    exact.set_attn_implementation("eager")
    output = exact(input_ids=token_ids[None], use_cache=False, output_hidden_states=True)
    return output.logits[0].float(), output.hidden_states[-1][0].float()


def run_rounds(decoder: FusedDecoder, sequences: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both sequences through chunks and decodes, mixed; logits and hidden states of each, all positions."""
    logits: list[list[Tensor]] = [[], []]
    hidden: list[list[Tensor]] = [[], []]
    for case in ROUNDS:
        meta = make_step(case).meta
        tables = torch.arange(34, dtype=torch.int32).view(2, 17)
        meta.block_tables = tables
        rows = torch.repeat_interleave(torch.arange(2), torch.tensor(case.query_lens))
        meta.slot_mapping = tables[rows, meta.positions // 16].long() * 16 + meta.positions % 16
        token_ids = torch.cat([s[n - q : n] for s, q, n in zip(sequences, case.query_lens, case.seq_lens, strict=True)])
        out, last = decoder(token_ids, meta.positions, meta, torch.arange(case.num_tokens))
        for i, part in enumerate(out.clone().split(list(case.query_lens))):
            logits[i].append(part)
        for i, part in enumerate(last.float().split(list(case.query_lens))):
            hidden[i].append(part)
    return [torch.cat(parts) for parts in logits], [torch.cat(parts) for parts in hidden]


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


@torch.inference_mode()
def check(model: Any, decoder: FusedDecoder) -> None:
    """No further from float32 than the model's own modules are in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB_SIZE, (case_length,), generator=generator) for case_length in (4, 256)]
    for ours, last, sequence in zip(*run_rounds(decoder, sequences), sequences, strict=True):
        exact, exact_hidden = own_logits(model, sequence, torch.float32)
        theirs, their_hidden = own_logits(model, sequence, torch.bfloat16)
        assert error(ours, exact) < 1.2 * error(theirs, exact)
        assert error(last, exact_hidden) < 1.2 * error(their_hidden, exact_hidden)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that the test makes compute with the kernels of each instruction set in turn."""
    lib = kernels_for(request.param)
    monkeypatch.setattr("worker.engine.fused.decoder.kernels", lambda: lib)


on_any_cpu = pytest.mark.usefixtures("instruction_set")


@on_any_cpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_further_from_float32_than_the_modules(name: str) -> None:
    model = make_model(name)
    check(model, make_decoder(model))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama with biases", "gemma2"])
def test_any_number_of_threads(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = make_model(name)
        check(model, make_decoder(model))
    finally:
        torch.set_num_threads(before)


@on_any_cpu
@pytest.mark.parametrize("name", ["llama with biases", "llama, tied, odd vocabulary", "llama, deep products", "gemma2"])
def test_weights_in_int8_are_no_further_from_the_same_in_float32(name: str) -> None:
    model = make_model(name)
    quantize_linears(model)
    check(model, make_decoder(model))


@torch.inference_mode()
def test_a_cache_of_int8_costs_little() -> None:
    model = make_model("llama")
    sequences = [torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(1)) for length in (4, 256)]
    expected, ours = (run_rounds(make_decoder(model, cache_dtype=dtype), sequences)[0] for dtype in (torch.bfloat16, torch.int8))
    assert all(0 < error(a, b) < 0.03 for a, b in zip(ours, expected, strict=True))


@on_any_cpu
@torch.inference_mode()
def test_a_step_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: the same request alone and beside others, in any order."""
    model = make_model("llama")
    decoder = make_decoder(model)
    token_ids = torch.randint(VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(2))
    alone = [decode(decoder, token_ids[i : i + 1])[0] for i in range(3)]
    together = decode(decoder, token_ids)
    for i in range(3):
        assert torch.equal(alone[i], together[i])


def decode(decoder: FusedDecoder, token_ids: Tensor) -> Tensor:
    """Logits of the last of a few whole prompts."""
    count, length = token_ids.shape
    meta = make_step(Case(query_lens=(length,) * count, seq_lens=(length,) * count)).meta
    rows = torch.arange(1, count + 1) * length - 1
    return decoder(token_ids.flatten(), meta.positions, meta, rows)[0].clone()


@on_any_cpu
@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama, tied, odd vocabulary", "gemma2"])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_likeliest_tokens_need_no_logits(name: str, count: int) -> None:
    decoder = make_decoder(make_model(name), num_blocks=100)
    meta = make_step(Case(query_lens=(20,) * count, seq_lens=(20,) * count)).meta
    token_ids = torch.randint(VOCAB_SIZE, (20 * count,), generator=torch.Generator().manual_seed(3))
    arguments = token_ids, meta.positions, meta, torch.arange(0, 20 * count, 7)
    logits, hidden = decoder(*arguments)
    tokens, same_hidden = decoder.likeliest(*arguments)
    assert tokens == logits.argmax(-1).tolist()
    assert torch.equal(hidden, same_hidden)


@on_any_cpu
@torch.inference_mode()
def test_a_row_of_nan_has_no_likeliest_token_and_harms_no_other() -> None:
    model = make_model("llama")
    model.model.embed_tokens.weight[7] = torch.nan
    decoder = make_decoder(model)
    meta = make_step(Case(query_lens=(1, 1, 1), seq_lens=(1, 1, 1))).meta
    tokens, _ = decoder.likeliest(torch.tensor([3, 7, 5]), meta.positions, meta, torch.arange(3))
    assert [token >= 0 for token in tokens] == [True, False, True]


@torch.inference_mode()
def test_equal_logits_are_a_choice_of_the_first() -> None:
    model = make_model("llama")
    model.lm_head.weight.zero_()
    decoder = make_decoder(model)
    meta = make_step(Case(query_lens=(1,), seq_lens=(1,))).meta
    assert decoder.likeliest(torch.tensor([3]), meta.positions, meta, torch.arange(1))[0] == [0]


@torch.inference_mode()
@pytest.mark.parametrize("int8", [False, True])
def test_released_modules_hold_no_weights_and_the_decoder_goes_on(int8: bool) -> None:
    model = make_model("llama")
    if int8:
        quantize_linears(model)
    decoder = make_decoder(model)
    token_ids = torch.arange(20)[None]
    before = decode(decoder, token_ids)
    decoder.release()
    assert all(stored_weight(linear)[0].numel() == 0 for linear in (model.model.layers[0].mlp.up_proj, model.lm_head))
    assert torch.equal(decode(decoder, token_ids), before)


def test_time_is_booked() -> None:
    decoder = make_decoder(make_model("llama"))
    decode(decoder, torch.arange(20)[None])
    assert all(seconds > 0 for seconds in decoder.phase_seconds().values())


def refuse(model: Any) -> str:
    layers = list(discover_layers(model, 512).values())
    with pytest.raises(NotRecognised) as refused:
        recognise(model, model.config, layers, 512)
    return str(refused.value)


def test_what_is_not_recognised_exactly_is_refused() -> None:
    assert "float32" in refuse(make_model("llama").float())
    assert "not a known architecture" in refuse(tiny_model("olmo2").bfloat16())
    assert "multiple of 32" in refuse(tiny_model("llama").bfloat16())
    model = make_model("llama")
    model.model.layers[1].mlp.extra = torch.nn.Parameter(torch.zeros(1))
    assert "unknown kind: mlp.extra" in refuse(model)
    model = make_model("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16))
    assert "unknown kind" in refuse(model)


def test_packing_moves_weights_and_pads_with_zeros() -> None:
    weight = torch.randn(40, 70).bfloat16()
    packed = pack(weight, torch.arange(40.0))
    assert packed.tiles.shape == (2, 3, 2, 16, 16, 2)
    assert packed.tiles[1, 2, 0, 2, 7, 1] == weight[32 + 7, 64 + 5]
    assert torch.equal(packed.tiles.float().sum(), weight.float().sum())
    assert packed.bias is not None
    assert packed.bias.tolist() == [*range(40), *[0] * 24]


def test_packing_int8_keeps_two_inputs_apart_that_bfloat16_has_side_by_side() -> None:
    codes = torch.randint(-127, 128, (40, 70), dtype=torch.int8)
    packed = pack(codes, None, torch.arange(1.0, 41.0)[:, None])
    assert packed.tiles.dtype == torch.int8
    assert packed.tiles[1, 2, 0, 2, 1, 7] == codes[32 + 7, 64 + 5]
    assert packed.scale is not None
    assert packed.scale.tolist() == [*range(1, 41), *[0] * 24]


def test_gates_and_their_values_share_panels() -> None:
    gate, up = (torch.nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(2))
    packed = pack_interleaved(gate, up)
    assert packed.tiles[1, 0, 0, 3, 5, 1] == gate.weight[16 + 5, 7]
    assert packed.tiles[1, 0, 1, 3, 5, 1] == up.weight[16 + 5, 7]
    assert packed.bias is not None
    assert packed.bias[32 + 16 + 5] == up.bias[16 + 5].float()
