"""The words that reports explain, and the glossary of the documents."""

from pathlib import Path

from magrpo.reports.glossary import MEANINGS

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_the_documents_explain_words_as_reports_do() -> None:
    own, _, of_reports = PAGE.read_text(encoding="utf-8").partition("## Words of reports")
    assert [line for line in of_reports.splitlines() if line.startswith("| ")][1:] == [
        f"| {word} | {meaning} |" for word, meaning in MEANINGS.items()
    ]
    assert [word for word in MEANINGS if f"\n| {word} |" in own] == [], "explained twice"
