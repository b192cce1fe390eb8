from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from magrpo.envs.writing import WritingEnv
from magrpo.problems.writing import Arxiv, Tldr
from tests.problems.test_files import jsonl

POST = "SUBREDDIT: r/garden\n\nTITLE: Slugs\n\nPOST: They ate my beans. TITLE: no, that is part of it.{}\n\nTL;DR:"
LONG = "We study how slugs find beans in a garden of average size and show that they do."


def test_a_post_is_taken_apart_into_title_and_text(tmp_path: Path) -> None:
    rows = [{"prompt": POST.format(f" Day {i}."), "completion": " Slugs."} for i in range(5)]
    rows.append({"prompt": POST.format("  Day 0.")})  # the same again, but for white space
    splits = Tldr(kind="tldr", source=jsonl(tmp_path / "posts.jsonl", rows), test_frac=0.4).load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 3, "test": 2}
    problem = next(p for problems in splits.values() for p in problems if "Day 0" in p.prompt)
    assert problem.prompt == "Slugs\n\nThey ate my beans. TITLE: no, that is part of it. Day 0."
    assert problem.tags == {"subreddit": "r/garden"}
    assert problem.task_id.startswith("tldr/")
    assert problem.prompt in WritingEnv(kind="writing").observe(problem, "summary", [], "a").messages[0].content


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Plain words of a note.\nTL;DR: ", "Plain words of a note."),
        ("TITLE: Beans\nPOST: They grew.", "Beans\n\nThey grew."),
        ("POST: with no title", "POST: with no title"),
        ("It says TL;DR: in the middle", "It says TL;DR: in the middle"),
    ],
)
def test_texts_of_other_forms_stay_as_they_are(text: str, kept: str) -> None:
    assert Tldr(kind="tldr").split_text(text) == (kept, {})


def test_abstracts_have_limits_of_number_and_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"task_id": f"mine/{i}", "abstract": f"{LONG} {i}"} for i in range(10)]
    rows += [{"abstract": "Too short."}, {"abstract": LONG * 40}]
    source = jsonl(tmp_path / "abstracts.jsonl", rows)
    splits = Arxiv(kind="arxiv", source=source, test_frac=0.3, num_train=4, num_test=2).load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 4, "test": 2}
    assert all(p.task_id.startswith("mine/") for problems in splits.values() for p in problems)
    assert "skipped 2 of 12 texts without 8 to 500 words (problems.min_words and problems.max_words)" in caplog.text
    with pytest.raises(ValueError, match=r"abstracts\.jsonl: no text has 700 to 800 words; widen problems\.min_words"):
        Arxiv(kind="arxiv", source=source, min_words=700, max_words=800).load()


def test_embedded_abstracts_need_no_file_and_no_hub() -> None:
    splits = Arxiv(kind="arxiv", source="embedded").load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 16, "test": 4}
    texts = {problem.prompt for problems in splits.values() for problem in problems}
    assert len(texts) == 20
    assert all(100 <= len(text.split()) <= 120 for text in texts)
    env = WritingEnv(kind="writing", task="arxiv")
    problem = splits["test"][0]
    assert problem.prompt in env.observe(problem, "methods", [], "a").messages[0].content


def test_a_row_without_a_text_is_named(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"abstract": LONG}, {"title": "x"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: has no field 'abstract_text' or 'abstract' or 'text'; its fiel"):
        Arxiv(kind="arxiv", source=source).load()


def test_a_hub_set_has_splits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"abstract_text": f"{LONG} Shared."}
    parts = {
        "train": [{"abstract_text": f"{LONG} {i}"} for i in range(6)] + [shared],
        "val": [{"abstract_text": f"{LONG} {i}."} for i in range(2)] + [{"abstract_text": f"{LONG}\nShared."}],
    }
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: Dataset.from_list(parts[split]))
    splits = Arxiv(kind="arxiv").load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 6, "test": 3}
    assert [p.prompt for p in splits["train"]] == [row["abstract_text"] for row in parts["train"][:6]]
    by_hash = Arxiv(kind="arxiv", hub_test_split="").load()
    assert {split: len(problems) for split, problems in by_hash.items()} == {"train": 6, "test": 1}


def test_splits_of_a_hub_set_may_number_their_texts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        split: [{"abstract_text": f"{LONG} {split} {i}", "task_id": i} for i in range(2)] for split in ("train", "val")
    }
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: Dataset.from_list(parts[split]))
    splits = Arxiv(kind="arxiv").load()
    assert [problem.task_id for problem in splits["train"]] == ["0", "1"]
    assert [problem.task_id for problem in splits["test"]] == ["val/0", "val/1"]


def test_one_file_of_a_hub_set_is_split_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"abstract": f"{LONG} {i}"} for i in range(10)])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name, repo_type: file)
    splits = Arxiv(kind="arxiv", source="owner/name:a.jsonl").load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 8, "test": 2}
    assert splits == Arxiv(kind="arxiv", source=file).load()
