"""Incremental text: whole characters, stop strings that never leak, and the same text however the tokens come."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from producer.sampling import SamplingParams
from worker.engine.detokenizer import Detokenizer
from worker.engine.model_loader import local_model_path

TEXTS = (
    "Hello, world! It's  a test.\n\n\tDone. ",
    "日本語のテキストと中文字符，混在。",  # noqa: RUF001 - a comma of that script
    "family: 👩‍👩‍👧‍👦 flag: 🇫🇷 skin: 👍🏽 🤷🏻‍♀️",
    unicodedata.normalize("NFD", "crème brûlée, Ångström, naïve ñ") + " e\u0301\u0323\u0308",
    "हिन्दी में पाठ और العربية עברית ไทย",
    " leading, trailing  ",
    "<|im_start|>user\nhi<|im_end|> \ufffd real replacement \x00 \u200b\u2028",
)


@cache
def smollm2() -> Any:
    return AutoTokenizer.from_pretrained(local_model_path("demo"))


def with_sentencepiece_decoder(decoder: Any) -> Any:
    """A vocabulary like Llama 2's: words marked with a low line, bytes as fallback."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "▁",
        "▁the",
        "▁c",
        "at",
        "s",
        "▁▁",
        ".",
        "é",
        "\ufffd",
        "▁日",
        "本",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def llama2_like() -> Any:
    strip = decoders.Strip(" ", 1, 0)
    return with_sentencepiece_decoder(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]))


@cache
def gemma_like() -> Any:
    return with_sentencepiece_decoder(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace() -> Any:
    return with_sentencepiece_decoder(decoders.Metaspace())


@cache
def wordpiece() -> Any:
    pieces = ["[UNK]", "[CLS]", "un", "##aff", "##able", "dog", ".", ",", "'", "s"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))  # noqa: S106 - a token of another kind
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


TOKENIZERS = (smollm2, llama2_like, gemma_like, metaspace, wordpiece)


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


def chunks_of(token_ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(token_ids) + 1) for cut in cuts}), len(token_ids)]
    return [list(token_ids[a:b]) for a, b in pairwise(edges)]


def run(tokenizer: Any, params: SamplingParams, chunks: Sequence[Sequence[int]]) -> tuple[str, str | None, int]:
    """All text, the stop string, and how many tokens were kept, of tokens pushed in these chunks."""
    detokenizer = Detokenizer(tokenizer, params)
    text, kept = "", 0
    for i, chunk in enumerate(chunks):
        delta = detokenizer.push(chunk, finished=i == len(chunks) - 1)
        text += delta.text
        kept += delta.num_tokens_kept
        assert text == detokenizer.emitted_text
        if delta.stopped_by is not None:
            return text, delta.stopped_by, kept
    return text, None, kept


cuts = st.lists(st.integers(0, 1000), max_size=6)


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_text_equals_decode_whatever_the_tokens_and_chunks(make: Any, data: st.DataObject) -> None:
    tokenizer = make()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=40))
    text, stop, kept = run(tokenizer, SamplingParams(), chunks_of(token_ids, data.draw(cuts)))
    assert (text, stop, kept) == (decoded(tokenizer, token_ids), None, len(token_ids))


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_of_text_is_whole(text: str) -> None:
    tokenizer = smollm2()
    token_ids = tokenizer(text).input_ids
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    pieces = [detokenizer.push([token_id], finished=False).text for token_id in token_ids]
    assert "".join(pieces) + detokenizer.push([], finished=True).text == decoded(tokenizer, token_ids)
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_an_unfinished_character_becomes_a_replacement_at_the_end_only() -> None:
    tokenizer = smollm2()
    token_ids = tokenizer("😀").input_ids[:-1]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert detokenizer.push(token_ids, finished=False).text == ""
    assert detokenizer.push([], finished=True).text == decoded(tokenizer, token_ids) == "\ufffd"


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = llama2_like()
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    cat = tokenizer.convert_tokens_to_ids(["▁c", "at"])
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert [detokenizer.push([t], finished=False).text for t in [*cat, *euro, *cat]] == ["c", "at", "", "", "", "€ c", "at"]


def test_special_and_unknown_tokens_have_no_text() -> None:
    tokenizer = smollm2()
    hello = tokenizer("hello").input_ids
    assert run(tokenizer, SamplingParams(), [[2, *hello, 2, 10**6, *hello]])[0] == "hellohello"


def test_stop_tokens_are_kept_but_have_no_text() -> None:
    tokenizer = smollm2()
    (word,) = tokenizer(" stop").input_ids
    hello = tokenizer("hello").input_ids
    assert run(tokenizer, SamplingParams(stop_token_ids=[word]), [hello, [word]]) == ("hello", None, len(hello) + 1)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), eos_token_ids=[word])
    assert detokenizer.push([*hello, word], finished=True).text == "hello"


# Stop strings


def encode(text: str) -> list[int]:
    token_ids: list[int] = smollm2()(text).input_ids
    return token_ids


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    token_ids = encode("The answer is <answer>forty-two</answer> and more text")
    detokenizer = Detokenizer(smollm2(), SamplingParams(stop=["</answer> and"]))
    published, kept = "", 0
    for token_id in token_ids:
        delta = detokenizer.push([token_id], finished=False)
        published += delta.text
        kept += delta.num_tokens_kept
        assert "The answer is <answer>forty-two".startswith(published)
        if delta.stopped_by is not None:
            break
    assert published == "The answer is <answer>forty-two"
    assert decoded(smollm2(), token_ids[:kept]).endswith("</answer> and")
    assert "</answer> and" not in decoded(smollm2(), token_ids[: kept - 1])


def test_what_might_have_become_a_stop_string_comes_out_later() -> None:
    detokenizer = Detokenizer(smollm2(), SamplingParams(stop=["one two three"]))
    token_ids = encode("zero one two four")
    pieces = [detokenizer.push([token_id], finished=False).text for token_id in token_ids]
    assert "".join(pieces) == "zero one two four"
    assert pieces[-1] == "one two four"


def test_what_is_held_at_the_end_comes_out() -> None:
    assert run(smollm2(), SamplingParams(stop=["###"]), [encode("ends with ##")]) == ("ends with ##", None, len(encode("ends with ##")))


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stopped_by"),
    [
        (["b", "a"], "xxab", "xx", "a"),
        (["abc", "ab"], "xxabc", "xx", "ab"),
        (["bcd", "abcdx"], "abcde", "a", "bcd"),
        (["aab"], "aaaab", "aa", "aab"),
        (["\n\n"], "line\n\nnext", "line", "\n\n"),
        (["👍"], "ok 👍🏽 fine", "ok ", "👍"),
        (["x"], "x", "", "x"),
    ],
)
def test_the_earliest_match_wins(stops: list[str], text: str, expected: str, stopped_by: str) -> None:
    token_ids = encode(text)
    for chunks in ([token_ids], [[token_id] for token_id in token_ids]):
        assert run(smollm2(), SamplingParams(stop=stops), chunks)[:2] == (expected, stopped_by)


def test_stop_strings_wait_for_min_tokens() -> None:
    token_ids = encode("one stop two stop three")
    text, stop, kept = run(smollm2(), SamplingParams(stop=["stop"], min_tokens=3), [token_ids])
    assert (text, stop) == ("one stop two ", "stop")
    assert kept == 4
    assert run(smollm2(), SamplingParams(stop=["stop"], min_tokens=2), [token_ids])[0] == "one "


def test_nothing_follows_a_stop() -> None:
    detokenizer = Detokenizer(smollm2(), SamplingParams(stop=["stop"]))
    assert detokenizer.push(encode("go stop go"), finished=False).text == "go "
    after = detokenizer.push(encode("more"), finished=True)
    assert (after.text, after.stopped_by, after.num_tokens_kept) == ("", "stop", 0)


words = st.lists(st.sampled_from(["a", "b", " a", "ab", " ", "aa", "日", "😀", "\n", "é"]), max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=words, stops=st.lists(words.filter(bool), max_size=3), min_tokens=st.integers(0, 6), cuts=cuts, resumed=st.integers(0, 25))
def test_stop_strings_do_the_same_whatever_the_chunks_and_resumes(
    text: str, stops: list[str], min_tokens: int, cuts: list[int], resumed: int
) -> None:
    token_ids, params = encode(text), SamplingParams(stop=stops, min_tokens=min_tokens)
    one_by_one = run(smollm2(), params, [*([token_id] for token_id in token_ids), []])
    assert run(smollm2(), params, chunks_of(token_ids, cuts)) == one_by_one
    full, stopped_by, kept = one_by_one
    assert stopped_by is not None or full == decoded(smollm2(), token_ids)
    assert stopped_by is None or decoded(smollm2(), token_ids[:kept]).startswith(full + stopped_by)
    resumed = min(resumed, kept)
    again = Detokenizer(smollm2(), params, token_ids[:resumed])
    assert again.emitted_text + again.push(token_ids[resumed:kept], finished=True).text == full


def test_a_resumed_text_goes_on_where_the_published_text_ended() -> None:
    token_ids = encode("a 😀 and one two three")
    params = SamplingParams(stop=["one two four"])
    for split in range(len(token_ids) + 1):
        first = Detokenizer(smollm2(), params)
        published = first.push(token_ids[:split], finished=False).text
        second = Detokenizer(smollm2(), params, token_ids[:split])
        assert second.emitted_text == published
        assert second.push(token_ids[split:], finished=True).text == first.push(token_ids[split:], finished=True).text
