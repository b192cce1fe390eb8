"""Copied and repeated words: examples worked out by hand, and what holds for every text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.repetition import (
    RUN,
    find_copied,
    find_repeated,
    leave_out,
    marked_share,
    marked_spans,
    share_prompt_words,
)

PROMPT = "Write a summary. The library reads and writes files of the format that older versions of the program made."
COPY = "The library reads and writes files of the format"
TEXTS = st.text(alphabet="ab \n.", max_size=80)


def test_a_sentence_of_the_prompt_is_copied_and_the_words_around_it_are_not() -> None:
    text = f"In short: {COPY}, says its page."
    marks = find_copied(text, PROMPT)
    assert [text[start:end] for start, end in marked_spans(text, marks)] == [COPY]
    assert marked_share(marks) == 9 / 17  # in short : ... , says its page .


def test_case_and_line_breaks_do_not_hide_a_copy() -> None:
    assert marked_share(find_copied(COPY.upper().replace(" ", "\n"), PROMPT)) == 1


def test_words_of_the_prompt_are_those_that_begin_alike() -> None:
    """By hand: libraries, formatted and PROGRAM begin as words of the prompt; seamless does not; the rest is short."""
    assert share_prompt_words("Seamless libraries, formatted for a PROGRAM", PROMPT) == 3 / 4
    assert share_prompt_words("It is as it was", PROMPT) == 1, "a few words say nothing"
    assert share_prompt_words("So it was but all in all it is not as it was", PROMPT) == 0, "nor do many short ones"
    assert share_prompt_words("図書館は古い形式を読む", PROMPT) == 1, "scripts without spaces have no long words"


def test_a_text_that_the_prompt_quotes_is_left_out_once() -> None:
    own = "Bread and cheese are all that anybody needs for a walk by the river."
    assert leave_out(f"{PROMPT}\n{own}\nRevise it.", [f" {own}\n"], PROMPT) == f"{PROMPT}\n \nRevise it."
    assert leave_out(f"{own}\n{own}", [own], own) == f" \n{own}", "a text that copies its prompt leaves it as it was"
    assert leave_out(own, [own], own) == own, "which quotes no answer, only its problem"
    assert leave_out(PROMPT, ["The library", ""], PROMPT) == PROMPT
    longer = f"{own} And it goes on."
    assert leave_out(f"{PROMPT}\n{longer}", [own, longer], PROMPT) == f"{PROMPT}\n ", "one begins with the other"


def test_a_run_of_fewer_words_is_no_copy() -> None:
    assert len(COPY.split()) == RUN + 1
    assert marked_share(find_copied("library reads and writes files of the", PROMPT)) == 0


def test_a_signature_that_a_program_must_repeat_is_shorter_than_a_run() -> None:
    signature = "def above_squares_mirror(xs):"
    assert marked_share(find_copied(f"{signature}\n    return xs", f"Complete this function:\n{signature}")) == 0


def test_words_that_the_prompt_quotes_from_the_agents_are_not_copied() -> None:
    """A later turn shows the answers of an earlier one, and a good answer is written again."""
    quoted = f"{PROMPT}\nYour last answer was: it is a library that reads and writes every format, old or new."
    own = "it is a library that reads and writes every format, old or new."
    assert marked_share(find_copied(own, quoted)) == 1
    assert marked_share(find_copied(own, quoted, [own])) == 0
    assert marked_share(find_copied(COPY, quoted, [own])) == 1


def test_the_second_time_a_run_is_written_it_is_a_repetition() -> None:
    text = "one two three four five six seven eight nine " * 3
    assert marked_share(find_repeated(text)) == 18 / 27
    assert marked_share(find_repeated(COPY)) == 0


def test_scripts_without_spaces_are_read_by_character() -> None:
    assert marked_share(find_copied("図書館は古い形式のファイルを読む", "図書館は古い形式のファイルを読む。")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "9月开始在全国学校实行新的课程标准",
        "会議は9時に始まります",
        "हिन्दी भारत की एक प्रमुख भाषा है",
        "தமிழ் ஒரு செம்மொழி ஆகும்",
        unicodedata.normalize("NFD", "Tiếng Việt được nói nhiều nhất"),
    ],
)
def test_a_text_in_any_script_has_the_words_of_itself(text: str) -> None:
    assert share_prompt_words(text, f"{text}.") == 1


def test_scripts_without_spaces_have_no_long_words() -> None:
    assert share_prompt_words("ประเทศไทยมีประชากรหลายล้านคน", PROMPT) == 1
    assert marked_share(find_copied("2023年开始在全国学校实行", "他们开始在全国学校实行。")) == 9 / 11


def test_an_empty_text_has_no_share() -> None:
    assert marked_share(find_copied("", PROMPT)) == marked_share(find_repeated("")) == 0


@given(TEXTS)
def test_a_text_is_a_copy_of_itself_once_it_has_a_run(text: str) -> None:
    marks = find_copied(text, text)
    assert marked_share(marks) == (1 if len(marks) >= RUN else 0)


@given(TEXTS, TEXTS)
def test_spans_hold_the_marked_words_and_nothing_else(text: str, prompt: str) -> None:
    marks = find_copied(text, prompt)
    spans = list(marked_spans(text, marks))
    assert all(start < end for start, end in spans)
    assert spans == sorted(spans)
    assert sum(len(find_repeated(text[start:end])) for start, end in spans) == sum(marks)
