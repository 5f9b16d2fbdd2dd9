"""What surrounds the steps on a device: captures that fail, memory that is measured, copies that nothing waits for, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests import tiny_engine
from tests.tiny_models import tiny_model
from tests.waits import nothing_waits
from worker.engine.attention.layers import AttentionLayer
from worker.engine.cuda_graphs import CudaGraphRecorder
from worker.engine.engine import Engine
from worker.engine.kv_cache import KVCache, peak_memory_bytes
from worker.engine.model_loader import prepare_model
from worker.engine.step import StepPlan

MIB = 1 << 20
LAYER = AttentionLayer(
    name="a", num_heads=2, num_kv_heads=2, head_dim=64, value_dim=64, scale=1.0, window=None, softcap=None, has_sinks=False
)


def product(size: int) -> Tensor:
    """A matrix to be multiplied with itself on the device."""
    return torch.randn(size, size, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


def test_work_that_waits_is_not_captured_and_leaves_the_device_as_it_was() -> None:
    record, matrix = CudaGraphRecorder(torch.device("cuda", 0)), product(64)
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()

    def waits() -> tuple[Tensor, ...]:
        return (matrix * matrix.sum().item(),)

    with pytest.raises(RuntimeError, match="synchroniz"):
        record(waits)
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    assert not torch.cuda.is_current_stream_capturing()
    graph, (result,) = record(lambda: (matrix @ matrix,))
    result.zero_()
    graph.replay()
    torch.testing.assert_close(result, matrix @ matrix)
    del graph, result
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    free_bytes = torch.cuda.mem_get_info()[0]
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free_bytes >= 64 * MIB, "the allocator still gives memory back"


def test_work_that_raises_while_it_is_captured_leaves_the_stream_as_it_was() -> None:
    record, matrix, calls = CudaGraphRecorder(torch.device("cuda", 0)), product(64), list[int]()
    stream = torch.cuda.current_stream()

    def raises_at_last() -> tuple[Tensor, ...]:
        calls.append(0)
        result = matrix @ matrix
        if len(calls) == 3:
            raise ValueError("not again")
        return (result,)

    with pytest.raises(ValueError, match="not again"):
        record(raises_at_last)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()


def test_capturing_again_takes_no_more_memory() -> None:
    matrix = product(1024).bfloat16()

    def capture() -> int:
        record = CudaGraphRecorder(torch.device("cuda", 0))
        graphs = [record(lambda size=size: (matrix[:size] @ matrix,)) for size in (1, 2, 64, 1024)]
        torch.cuda.synchronize()
        del graphs
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    capture()
    assert capture() == capture()


def test_the_peak_of_work_is_found_and_nothing_of_it_is_kept() -> None:
    before = peak_memory_bytes(torch.device("cuda", 0), lambda: None), torch.cuda.memory_reserved()

    def work() -> None:
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del first
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")

    assert 96 * MIB <= peak_memory_bytes(torch.device("cuda", 0), work) <= 140 * MIB
    assert (0, torch.cuda.memory_reserved()) == before


def test_swap_copies_wait_for_nothing_and_keep_their_order(device: str) -> None:
    """Blocks on either side go to another at once, while copies that read them are still to be done."""
    cache = KVCache([LAYER] * 4, 400, 16, torch.float32, torch.device(device), num_cpu_blocks=200)
    for pair in cache.layers:
        for tensor in pair:
            tensor.add_(torch.arange(400, device=device).view(-1, 1, 1, 1))
    plans = [
        StepPlan(swap_out=[(i, 199 - i) for i in range(100)] + [(i, i - 100) for i in range(100, 200)]),
        StepPlan(swap_in=[(199 - i, 200 + i) for i in range(100)]),
        StepPlan(swap_out=[(399 - i, 100 + i) for i in range(100)], swap_in=[(i, 200 + i) for i in range(100)]),
        StepPlan(swap_in=[(100 + i, i) for i in range(100)]),
    ]
    with nothing_waits(device):
        for plan in plans:
            cache.copy_blocks(plan)
            if plan is plans[0]:
                cache.clear(200)
    if device == "cuda":
        torch.cuda.synchronize()
    expected = [*range(399, 299, -1), *[0] * 100, *range(100, 200), *range(300, 400)]
    for pair in cache.layers:
        for tensor in pair:
            assert torch.equal(tensor.cpu(), torch.tensor(expected).view(-1, 1, 1, 1).expand(tensor.shape).float())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_an_engine_of_another_device_may_be_stepped_by_another_thread() -> None:
    def outputs(engine: Engine) -> list[list[int]]:
        requests = [tiny_engine.request(f"r{i}", range(1, 4 + 9 * i), 8) for i in range(4)]
        tiny_engine.run(engine, requests)
        return [request.output_token_ids for request in requests]

    def make(index: int) -> Engine:
        return tiny_engine.tiny_engine(prepare_model(tiny_model("llama").to(f"cuda:{index}"), tiny_engine.byte_tokenizer(), "tiny"))

    with ThreadPoolExecutor(1) as maker, ThreadPoolExecutor(1) as stepper:
        engines = [maker.submit(make, index).result() for index in (0, 1)]
        first, second = (stepper.submit(outputs, engine).result() for engine in engines)
        assert first == second
        assert stepper.submit(torch.cuda.current_device).result() == 0
