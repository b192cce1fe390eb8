from __future__ import annotations

import random
from collections import Counter

import pytest

from infra.embedded.conventions import LENGTHS, MANNERS, Voices, parse_facts
from magrpo.envs.writing import WritingEnv
from magrpo.problems.notes import KINDS, Notes, format_sentence
from magrpo.rewards.writing import WritingReward, count_transition_categories
from magrpo.types import Problem, Split

VOICES = Voices()


@pytest.fixture(scope="module")
def splits() -> dict[Split, list[Problem]]:
    return Notes(kind="notes", num_train=400, num_test=60).load()


def test_notes_are_the_same_each_time_and_all_different(splits: dict[Split, list[Problem]]) -> None:
    assert Notes(kind="notes", num_train=100, num_test=60).load()["train"] == splits["train"][:100]
    notes = [note for members in splits.values() for note in members]
    assert len({note.prompt for note in notes}) == len({note.task_id for note in notes}) == len(notes)
    assert {*Counter(note.tags["topic"] for note in splits["train"]).values()} == {40}


def test_a_note_is_a_title_and_the_sentences_of_its_facts(splits: dict[Split, list[Problem]]) -> None:
    for note in splits["train"]:
        title, _, body = note.prompt.partition("\n")
        facts = parse_facts(note)
        assert title
        assert "{" not in body
        assert body == " ".join(format_sentence(fact.words) for fact in facts)
        assert 3 <= len(facts) <= 6
        assert [fact.kind for fact in facts] == sorted({fact.kind for fact in facts}, key=KINDS.index)


def test_stories_held_out_never_occur_in_training(splits: dict[Split, list[Problem]]) -> None:
    def story(note: Problem) -> tuple[str, ...]:
        """Trouble and result word for word; the start without the day at its end."""
        facts = {fact.kind: fact.words for fact in parse_facts(note)}
        return facts["start"][:30], facts["trouble"], facts["result"]

    assert not {*map(story, splits["train"])} & {*map(story, splits["test"])}


def test_authors_tell_facts_of_the_note(splits: dict[Split, list[Problem]]) -> None:
    rng = random.Random(0)
    lengths: Counter[int] = Counter()
    for note in splits["train"]:
        for role in VOICES.roles:
            length, manner, _ = VOICES.draw(rng, role).split()
            convention = f"{length} {manner} 0"
            text = VOICES.write(note, role, convention)
            told = [fact for fact in parse_facts(note) if fact.words.lower() in text.lower()]
            assert len(told) == min(int(length), len(parse_facts(note)))
            assert manner == "linked" or text == " ".join(format_sentence(fact.words) for fact in told) or not told
            assert text == VOICES.write(note, role, convention)
            assert text.startswith(" ".join(VOICES.flawed(note, role, convention, rng).split()))
            lengths[int(length)] += role == "summary"
    assert set(lengths) >= set(LENGTHS["summary"])


def test_the_two_texts_fit_where_lengths_do_and_links_pay(splits: dict[Split, list[Problem]]) -> None:
    reward, note = WritingReward(), max(splits["train"], key=lambda note: len(parse_facts(note)))

    def joint(short: int, long: int, manner: str) -> float:
        texts = {"summary": VOICES.write(note, "summary", f"{short} plain 0")}
        return reward.price(
            note, texts | {"elaboration": VOICES.write(note, "elaboration", f"{long} {manner} 0")}, {}
        ).total

    assert joint(0, 3, "linked") == 0, "a title is too short"
    assert joint(3, 1, "linked") == pytest.approx(0.5), "the second is to be the longer one"
    plain, linked = (joint(1, 3, manner) for manner in MANNERS)
    assert 2 < plain < linked < 3


def test_sentences_of_notes_hold_few_transition_words(splits: dict[Split, list[Problem]]) -> None:
    counts = [count_transition_categories(fact.words) for note in splits["train"] for fact in parse_facts(note)]
    assert sum(counts) < 0.05 * len(counts)


def test_the_tiny_model_sees_a_note_under_its_role(splits: dict[Split, list[Problem]]) -> None:
    note = splits["test"][0]
    seen = WritingEnv(kind="writing", prompt="bare").observe(note, "summary", [], "a").messages[0].content
    assert seen == f"# summary\n{note.prompt}"
