"""Detokenising across tokens, stop strings and log-probabilities."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.serve.text.output_processor import (
    OutputOptions,
    OutputPiece,
    OutputProcessor,
    StopStrings,
)
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer
from counterpoint.types import FinishReason, OutputDelta, TokenLogprobs

TEXT = make_byte_tokenizer()
END = TEXT.tokenizer.token_to_id("<|im_end|>")


def play(
    tokens: list[int],
    options: OutputOptions = OutputOptions(),
    *,
    cuts: int = 1,
    finish: FinishReason = FinishReason.LENGTH,
    stopped_by: int | None = None,
) -> tuple[str, list[OutputPiece]]:
    """The text and the pieces of `tokens`, `cuts` of them per delta."""
    answer = OutputProcessor(TEXT, options)
    pieces = []
    parts = [tokens[i : i + cuts] for i in range(0, len(tokens), cuts)]
    for number, part in enumerate(parts):
        final = number == len(parts) - 1
        logprobs = tuple(TokenLogprobs(-1.0) for _ in part)
        end = (finish, stopped_by) if final else (None, None)
        pieces.append(
            answer.feed(
                OutputDelta(
                    "x", tuple(part), logprobs=logprobs, finish_reason=end[0], stop_reason=end[1]
                )
            )
        )
    return "".join(piece.text for piece in pieces), pieces


def first_end(text: str, stops: list[str]) -> str:
    """The text before the stop string that ends first (the longest of those), found without
    StopStrings."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start]
    return text


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.integers(0, 10**9),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_cut_the_same_however_text_arrives(text: str, stops: list[str], seed: int):
    chance = random.Random(seed)
    matcher, out, at, met = StopStrings(stops), "", 0, None
    while at < len(text) and met is None:
        size = chance.randint(1, 4)
        part, met = matcher.feed(text[at : at + size])
        out, at = out + part, at + size
        begun = [n for stop in stops for n in range(1, len(stop)) if text[:at].endswith(stop[:n])]
        assert met or len(out) <= min(at, len(text)) - max(begun, default=0), (
            "the beginning of a stop string is out"
        )
    if met is None:
        out += matcher.flush()
    assert out == first_end(text, stops)


def test_a_stop_inside_a_word_and_across_tokens():
    options = OutputOptions(stop_strings=("th",))
    text, pieces = play(list(b"with a moth"), options)
    assert text == "wi"
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["stop"]
    stopped = next(p for p in pieces if p.finish_reason)
    assert stopped.stop_reason == "th" and stopped.needs_abort
    assert all(p == OutputPiece() for p in pieces[pieces.index(stopped) + 1 :]), (
        "nothing may follow the finish"
    )


def test_a_held_suffix_is_released_at_the_end():
    text, pieces = play(list(b"alpha beta"), OutputOptions(stop_strings=("beta gamma",)))
    assert text == "alpha beta"
    assert (
        pieces[-1].text == "beta"
        and pieces[-1].finish_reason == "length"
        and not pieces[-1].needs_abort
    )


def test_the_stop_string_may_be_included():
    text, _ = play(
        list(b"one END two"), OutputOptions(stop_strings=("END",), include_stop_string=True)
    )
    assert text == "one END"


def test_stops_count_only_after_min_tokens():
    text, _ = play(list(b"aXbXc"), OutputOptions(stop_strings=("X",), min_tokens=3))
    assert text == "aXb"


@pytest.mark.parametrize("cuts", [1, 2, 3, 7])
def test_characters_across_tokens_are_whole(cuts: int):
    said = "héllo 漢字 😀👩‍👩‍👧‍👦 �."
    text, pieces = play(list(said.encode()), cuts=cuts)
    assert text == said
    assert all("\ufffd" not in piece.text or "�." in said for piece in pieces)


def test_a_real_replacement_character_is_not_waited_for():
    _, pieces = play(list("\ufffd\ufffdx".encode()))
    assert [piece.text for piece in pieces] == ["", "", "\ufffd", "", "", "\ufffd", "x"]


def test_an_unfinished_character_is_flushed_as_a_replacement():
    text, pieces = play(list("a漢".encode())[:-1])
    assert text == "a\ufffd" and pieces[-1].text == "\ufffd"


def test_a_character_that_the_prompt_began_is_finished():
    data = "漢".encode()
    answer = OutputProcessor(TEXT, OutputOptions(), prompt=[97, data[0]])
    assert [answer.feed(OutputDelta("x", (t,))).text for t in data[1:]] == ["", "漢"]
    answer = OutputProcessor(TEXT, OutputOptions(), prompt=[97, data[0]])
    assert answer.feed(OutputDelta("x", (98,))).text == "b", (
        "a prompt's loose bytes are not the answer's"
    )


def test_special_tokens_are_not_shown_unless_wanted():
    assert play([104, END, 105])[0] == "hi"
    assert play([104, END, 105], OutputOptions(skip_special_tokens=False))[0] == "h<|im_end|>i"


def test_the_token_that_ends_an_answer_is_not_part_of_it():
    assert play([104, 105, 33], finish=FinishReason.STOP, stopped_by=33)[0] == "hi"
    assert (
        play(
            [104, 105, 33],
            OutputOptions(include_stop_string=True),
            finish=FinishReason.STOP,
            stopped_by=33,
        )[0]
        == "hi!"
    )


def test_logprob_entries_go_with_their_text():
    said = "né 漢 END rest"
    options = OutputOptions(stop_strings=("END",), logprobs=True)
    text, pieces = play(list(said.encode()), options)
    assert text == "né 漢 "
    shown = ""
    entries = []
    for piece in pieces:
        shown += piece.text
        entries += piece.logprob_entries
        assert b"".join(TEXT.token_bytes(e.token) for e in entries).decode() == shown, (
            "entries and text are out of step"
        )
    assert [e.start for e in entries] == [0, 1, 1, 2, 3, 3, 3, 4]


def test_logprob_entries_of_the_last_unfinished_character_are_not_lost():
    tokens = list("a漢".encode())[:-1]
    _, pieces = play(tokens, OutputOptions(logprobs=True))
    assert [e.token for piece in pieces for e in piece.logprob_entries] == tokens
