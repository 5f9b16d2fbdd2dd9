import pytest

from producer.errors import ContextLengthExceeded
from producer.sampling import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.request import Request, RequestStatus
from worker.engine.scheduler import Scheduler


def make_request(name: str, prompt: int, max_tokens: int) -> Request:
    return Request(id=name, prompt_token_ids=[ord(name)] * prompt, params=SamplingParams(), max_tokens=max_tokens)


def run(scheduler: Scheduler) -> list[list[tuple[str, int, int]]]:
    steps = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.chunks
        scheduler.advance(plan)
        for chunk in plan.chunks:
            if chunk.last:
                chunk.request.output_token_ids.append(7)
                if len(chunk.request.output_token_ids) == chunk.request.max_tokens:
                    scheduler.finish(chunk.request)
        steps.append([(c.request.id, c.start, c.num_tokens) for c in plan.chunks])
    return steps


def test_chunked_prefill_runs_beside_decodes_within_the_budget() -> None:
    scheduler = Scheduler(EngineConfig(max_batch_size=4, max_batch_tokens=8), num_blocks=16)
    scheduler.add(make_request("a", 3, 4))
    scheduler.add(make_request("b", 12, 2))
    assert run(scheduler) == [[("a", 0, 3), ("b", 0, 5)], [("a", 3, 1), ("b", 5, 7)], [("a", 4, 1), ("b", 12, 1)], [("a", 5, 1)]]
    assert scheduler.stats().free_blocks == 16


def test_two_prompts_of_sixty_percent_of_the_pool_run_one_after_the_other() -> None:
    scheduler = Scheduler(EngineConfig(max_batch_size=4, max_batch_tokens=512), num_blocks=10)
    for name in "ab":
        scheduler.add(make_request(name, 90, 6))
    assert [len(step) for step in run(scheduler)] == [1] * 12


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(EngineConfig(), num_blocks=4, max_model_len=1024)
    with pytest.raises(ContextLengthExceeded):
        scheduler.add(make_request("a", 64, 2))
    with pytest.raises(ContextLengthExceeded):
        scheduler.add(make_request("a", 1024, 1))
    scheduler.add(make_request("b", 64, 1))
    assert len(run(scheduler)) == 1


def test_finish_takes_a_request_out_of_any_state() -> None:
    scheduler = Scheduler(EngineConfig(), num_blocks=4)
    running, waiting = make_request("a", 60, 2), make_request("b", 60, 2)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    for request in (waiting, running, running):
        scheduler.finish(request)
        assert request.status is RequestStatus.FINISHED
    assert scheduler.stats().free_blocks == 4
