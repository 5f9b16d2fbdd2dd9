from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producer.sampling import SamplingParams
from producer.wire import Chunk, TokenLogprob
from tests.fakes import FakeDetokenizer, text_of
from worker.transcript import Transcript


def transcript(*, logprobs: bool = False, **params: object) -> Transcript:
    return Transcript(FakeDetokenizer(SamplingParams(**params)), logprobs=logprobs)  # type: ignore[arg-type]  # by name


def text(tokens: list[int]) -> str:
    return "".join(map(text_of, tokens))


def test_chunks_begin_where_the_last_one_that_stands_ended() -> None:
    it = transcript()
    it.push([1, 2], None, finished=False)
    assert it.unpublished() == Chunk(" 1 2", [1, 2], 0)
    it.push([3], None, finished=False)
    assert it.unpublished() == Chunk(" 1 2 3", [1, 2, 3], 0)  # the first did not arrive
    it.stands_published(2)  # or did it: only its answer was lost
    assert it.unpublished() == Chunk(" 3", [3], 2)


def test_published_again_from_where_the_server_lost_its_last_writes() -> None:
    it = transcript()
    for token in (1, 2, 3):
        it.push([token], None, finished=False)
        it.unpublished()
        it.stands_published(token)
    it.stands_published(1)
    assert it.unpublished() == Chunk(" 2 3", [2, 3], 1)


def test_nothing_more_is_published_behind_frames_of_somebody_else() -> None:
    it = transcript()
    it.push([1, 2, 3], None, finished=False)
    it.unpublished()
    it.stands_published(2)  # no frame of ours ended there
    assert it.num_unpublished == 0


def test_resumed_output_goes_on_behind_what_was_published() -> None:
    it = transcript()
    it.resume([Chunk(" 1 2", [1, 2], 0), Chunk(" 3", [3], 2)])
    assert (it.token_ids, it.text, it.num_unpublished) == ([1, 2, 3], " 1 2 3", 0)
    it.push([4], None, finished=True)
    assert it.unpublished() == Chunk(" 4", [4], 3)


def test_resume_takes_no_token_whose_logprob_is_missing() -> None:
    it = transcript(logprobs=True)
    logprob = TokenLogprob(1, -0.1, {})
    it.resume([Chunk(" 1", [1], 0, logprobs=[logprob]), Chunk(" 2", [2], 1)])
    assert (it.token_ids, it.logprobs) == ([1], [logprob])


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    it = transcript(stop=(" 2",))
    assert it.push([1, 2, 3], None, finished=False) == " 2"
    assert (it.token_ids, it.text) == ([1, 2], " 1")


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["arrived", "lost", "answer lost", "server forgot"])), max_size=30))
def test_whatever_is_lost_the_frames_that_stand_have_no_seam(rounds: list[tuple[int, str]]) -> None:
    it = transcript()
    stand: list[Chunk] = []
    token = 0
    for count, fate in rounds:
        it.push(list(range(token, token + count)), None, finished=False)
        token += count
        chunk = it.unpublished()
        position = sum(len(each.token_ids) for each in stand)
        if fate == "server forgot":
            stand = stand[: len(stand) // 2]
        elif fate != "lost" and chunk.index == position:
            stand.append(chunk)
        if fate in ("arrived", "server forgot"):
            it.stands_published(sum(len(each.token_ids) for each in stand))
    while it.num_unpublished or sum(len(each.token_ids) for each in stand) < token:
        chunk = it.unpublished()
        if chunk.index == sum(len(each.token_ids) for each in stand):
            stand.append(chunk)
        it.stands_published(sum(len(each.token_ids) for each in stand))
    assert [t for each in stand for t in each.token_ids] == list(range(token))
    assert "".join(each.text for each in stand) == text(list(range(token))) == it.text
