from __future__ import annotations

import math

import pytest
import torch

from ops.bench.quality import _compared, _outputs, _perplexity
from tests.tiny_engine import loaded_model, tiny_engine
from tests.tiny_models import VOCAB_SIZE, tiny_model

WINDOWS = [torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (90, 2, 33)]


@torch.inference_mode()
def test_perplexity_is_that_of_the_models_own_logits() -> None:
    model = tiny_model("llama")
    total = 0.0
    for window in WINDOWS:
        logprobs = model(input_ids=torch.tensor([window]), use_cache=False).logits[0].double().log_softmax(-1)
        total += float(logprobs[:-1].gather(1, torch.tensor(window[1:])[:, None]).sum())
    expected = math.exp(-total / sum(len(window) - 1 for window in WINDOWS))
    assert _perplexity(tiny_engine(loaded_model()), WINDOWS) == pytest.approx(expected, rel=1e-4)


def test_outputs_come_in_the_order_of_their_prompts() -> None:
    engine = tiny_engine()
    together = _outputs(engine, WINDOWS, 5)
    assert [_outputs(tiny_engine(), [window], 5)[0] for window in WINDOWS] == together


def test_agreement_ends_with_the_first_difference() -> None:
    quality = _compared("a", 2.0, [[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 9]], [[1, 2, 3, 4]] * 4)
    assert quality.exact_match == 0.25
    assert quality.agreeing_tokens == (4 + 1 + 0 + 3) / 4
