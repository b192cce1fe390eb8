from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.interfaces import Reward
from magrpo.rewards.writing import (
    FORMS,
    MAXIMA,
    TRANSITIONS,
    SoloWritingReward,
    Window,
    WritingReward,
    count_transition_categories,
    score_length_ratio,
    score_structure,
    score_style,
    score_unique_words,
    split_texts,
)
from magrpo.types import Problem

PROBLEM = Problem("post/0", "A post.")


def words(number: int, different: int, length: int = 4, start: int = 0) -> str:
    """``number`` words of ``length`` characters, the first ``different`` of them distinct (no word of any list)."""
    return " ".join(f"{start + i % different:0{length}d}" for i in range(number))


def price(task: str, first: str, second: str) -> tuple[float, ...]:
    texts = dict(zip(FORMS[task].roles, (first, second), strict=True))
    reward = WritingReward.model_validate({"task": task}).price(PROBLEM, texts, {})
    assert reward.total == sum(reward.parts.values())
    return tuple(reward.parts[name] for name in MAXIMA)


# ------------------------------------------------------------------------------------------------ each level, by hand
@pytest.mark.parametrize(
    ("x", "y"),
    [(1.0, 0.0), (1.1, 0.0), (1.35, 0.5), (1.6, 1.0), (2.0, 1.0), (3.2, 1.0), (4.1, 0.5), (5.0, 0.0), (6.0, 0.0)],
)
def test_tldr_length_window(x: float, y: float) -> None:
    assert FORMS["tldr"].length_ratio(x) == pytest.approx(y)


@pytest.mark.parametrize(("x", "y"), [(1.0, 0.0), (1.3, 0.0), (1.65, 0.5), (2.0, 1.0), (1e9, 1.0)])
def test_tldr_unique_window(x: float, y: float) -> None:
    assert FORMS["tldr"].unique_words(x) == pytest.approx(y)


@pytest.mark.parametrize(
    ("task", "x", "y"),
    [
        *(("arxiv", x, y) for x, y in [(0.7, 0), (0.8, 0), (0.9, 0.5), (1, 1), (1.3, 1), (1.4, 0.5), (1.5, 0), (2, 0)]),
        *(("arxiv_late", x, y) for x, y in [(0.8, 0), (1.05, 0.5), (1.3, 1), (1.6, 1), (1.8, 0.5), (2, 0), (3, 0)]),
    ],
)
def test_arxiv_length_windows(task: str, x: float, y: float) -> None:
    assert FORMS[task].length_ratio(x) == pytest.approx(y)


@pytest.mark.parametrize("task", ["arxiv", "arxiv_late"])
@pytest.mark.parametrize(("x", "y"), [(0.5, 0), (0.6, 0.5), (0.7, 1), (1.3, 1), (1.5, 0.5), (1.7, 0), (1.8, 0)])
def test_arxiv_unique_window(task: str, x: float, y: float) -> None:
    assert FORMS[task].unique_words(x) == pytest.approx(y)


@pytest.mark.parametrize(
    ("task", "counts", "value"),
    [
        ("tldr", (8, 256), 1),
        ("tldr", (7, 100), 0),
        ("tldr", (100, 257), 0),
        ("arxiv", (128, 256), 1),
        ("arxiv", (127, 200), 0),
        ("arxiv_late", (200, 257), 0),
    ],
)
def test_structure_counts_words(task: str, counts: tuple[int, int], value: float) -> None:
    assert score_structure(FORMS[task], *(words(count, 5) for count in counts)) == value


def test_ratios_are_of_characters_and_of_different_words() -> None:
    first, second = "ab ab cd", "ab cd ef gh ij kl"  # 8 and 17 characters, 2 and 6 words
    assert score_length_ratio(Form := FORMS["tldr"], first, second) == 1.0
    assert score_unique_words(Form, first, second) == 1.0
    assert score_length_ratio(Form, first, "ab Ab aB AB") == pytest.approx((11 / 8 - 1.1) / 0.5)
    assert score_unique_words(Form, first, "ab Ab aB AB") == 0.0
    assert score_length_ratio(Form, "", "ab") == 0.0
    assert score_unique_words(Form, "...", "ab") == 0.0


def test_style_of_tldr() -> None:
    form = FORMS["tldr"]
    # 1 shared of 4 content words: 0.25 is over the cap of 0.03; transitions only in the second text: 2 categories
    assert score_style(form, "However the cat", "cat dog, therefore mouse; if") == pytest.approx(0.4 * 0.45 + 0.6)
    assert score_style(form, "however if cat", "dog") == 0.0
    assert score_style(form, "the", "and") == pytest.approx(0.0)


def test_style_of_arxiv() -> None:
    form = FORMS["arxiv"]
    # 1 shared content word of 8: 0.125 / 0.23; transitions in both texts: contrast, cause
    first, second = "cats run however far", "cats swim fast; therefore win"
    assert score_style(form, first, second) == pytest.approx(0.4 * 0.45 + 0.6 * 0.125 / 0.23)


def test_levels_are_gated() -> None:
    assert price("tldr", "few words", words(50, 40)) == (0.0, 0.0, 0.0, 0.0)
    assert price("tldr", words(20, 20), words(20, 20)) == (0.5, 0.0, 0.0, 0.0)
    assert price("tldr", words(20, 20), words(40, 20)) == (0.5, 1.0, 0.0, 0.0)
    assert price("tldr", words(20, 20), words(40, 40, start=100)) == (0.5, 1.0, 0.5, 0.0)


def test_golden_of_tldr() -> None:
    first, second = words(20, 20), f"{words(38, 33)} however therefore"
    # 99 and 207 characters: ratio 2.09; 20 and 35 different words: 1.75; overlap 20/35; two categories
    assert price("tldr", first, second) == pytest.approx((0.5, 1.0, 0.5 * 0.45 / 0.7, 0.4 * 0.45 + 0.6))


def test_golden_of_arxiv() -> None:
    first, second = words(130, 100), f"{words(154, 99, start=90)} however"
    # 649 and 777 characters: ratio 1.197; 100 and 100 different words; overlap 10/190; one category
    expected = (0.5, 1.0, 0.5, 0.4 * 0.4 + 0.6 * (10 / 190) / 0.23)
    assert price("arxiv", first, second) == pytest.approx(expected)
    late = (0.5, (777 / 649 - 0.8) / 0.5, 0.5, expected[3])
    assert price("arxiv_late", first, second) == pytest.approx(late)


def test_white_space_does_not_lengthen() -> None:
    first, second = words(20, 20), words(40, 40)
    assert price("tldr", f" \n{first}\n\n", second.replace(" ", " \n   ")) == price("tldr", first, second)


# ----------------------------------------------------------------------------------------------------- transition words
def test_transitions_are_whole_words() -> None:
    assert count_transition_categories("butter, thenceforth; asymmetric sofas, ifs, nowhere") == 0
    assert count_transition_categories("BUT") == 1
    assert count_transition_categories("(but)") == 1
    assert count_transition_categories("On the other\nhand, ...") == 1
    assert count_transition_categories("on the other") == 0


def test_transition_scale() -> None:
    firsts = [listing.split(";")[0].strip() for listing in TRANSITIONS.values()]
    for count, value in [(1, 0.4), (2, 0.45), (12, 0.95)]:
        assert score_style(FORMS["tldr"], "cat", ", ".join(firsts[:count])) == pytest.approx(0.4 * value)


# -------------------------------------------------------------------------------------------------------- the plug-in
def test_nothing_runs_and_nothing_passes() -> None:
    reward: Reward = WritingReward()
    assert reward.executions(PROBLEM, {"summary": "a", "elaboration": "b"}, {}) == {}
    assert reward.passed({}) is None
    assert reward.fraction(3.0) == 1.0
    assert sum(reward.maxima.values()) == 3.0


def test_scale_and_shift() -> None:
    texts = {"summary": words(20, 20), "elaboration": words(40, 20)}
    assert WritingReward(scale=2.0, shift=-1.0).price(PROBLEM, texts, {}).total == 2.0


WORDS = st.sampled_from(["cat", "dog", "however", "if", "the", "runs"])
TEXT = st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=300).map(" ".join))


@given(TEXT, TEXT, st.sampled_from(list(FORMS)))
def test_price_is_bounded_and_gated(first: str, second: str, task: str) -> None:
    parts = price(task, first, second)
    assert all(0 <= part <= maximum for part, maximum in zip(parts, MAXIMA.values(), strict=True))
    assert all(later == 0 for part, later in pairwise(parts) if part == 0)


@given(st.floats(-10, 10))
def test_windows_are_between_0_and_1(x: float) -> None:
    for window in (Window(0.8, 1.0, 1.3, 1.5), Window(1.3, 2.0)):
        assert 0 <= window(x) <= 1
    assert Window(1.3, 2.0)(math.inf) == 1


# ---------------------------------------------------------------------------------------------- the paper's quantities
def measure(task: str, first: str, second: str) -> tuple[float, ...]:
    texts = dict(zip(FORMS[task].roles, (first, second), strict=True))
    measured = WritingReward.model_validate({"task": task}).measure_texts(texts)
    assert list(measured) == ["structure", "consistency", "coherence"]
    return tuple(measured.values())


def test_quantities_of_the_paper_by_hand() -> None:
    """132 characters to 99 earn 7/15 of the ratio; no word is shared; one category of transition words of twelve."""
    first, second = words(20, 10), f"{words(25, 20, start=100)} however"
    assert price("tldr", first, second) == pytest.approx((0.5, 7 / 15, 0.5, 0.16))
    assert measure("tldr", first, second) == pytest.approx(((1 + 7 / 15) / 2, 0.0, 0.4))


def test_quantities_of_the_paper_count_where_the_reward_stops() -> None:
    short, text = "however 0001", f"{words(20, 10)} however"
    assert sum(price("tldr", short, text)) == 0
    structure, consistency, coherence = measure("tldr", short, text)
    assert structure == pytest.approx(0.5 / 2), "different words; the ratio of lengths is above 5"
    assert consistency == 1.0
    assert coherence == 0.4
    assert measure("tldr", "", "") == (0.0, 0.0, 0.0)


@given(st.text(), st.text(), st.sampled_from(sorted(FORMS)))
def test_style_is_coherence_and_consistency(first: str, second: str, task: str) -> None:
    _, consistency, coherence = measure(task, first, second)
    assert 0 <= consistency <= 1
    assert 0 <= coherence <= 1
    style = score_style(FORMS[task], " ".join(first.split()), " ".join(second.split()))
    assert style == pytest.approx(0.4 * coherence + 0.6 * consistency)


# ------------------------------------------------------------------------------------------------------ a single author
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one\n\ntwo", ("one", "two")),
        ("\n\none\nmore\n \t\ntwo\n\nthree\n", ("one\nmore", "two\n\nthree")),
        ("one\ntwo", ("one\ntwo", "")),
        ("", ("", "")),
    ],
)
def test_texts_are_split_at_the_first_empty_line(text: str, parts: tuple[str, str]) -> None:
    assert split_texts(text) == parts


@pytest.mark.parametrize("task", ["tldr", "arxiv", "arxiv_late"])
def test_a_single_author_earns_as_much_as_two(task: str) -> None:
    first, second = f"{words(130, 80)} however", f"{words(200, 170)} therefore"
    alone = SoloWritingReward.model_validate({"task": task})
    assert alone.maxima == WritingReward().maxima
    texts = {"solo": f"{first}\n\n{second}"}
    assert tuple(alone.price(PROBLEM, texts, {}).parts.values()) == price(task, first, second)
    assert tuple(alone.measure_texts(texts).values()) == measure(task, first, second)
    one_text = alone.price(PROBLEM, {"solo": f"{first} {second}"}, {})
    assert one_text.total == 0, "the second text is missing"
