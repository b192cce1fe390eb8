"""The licence of a base model, read from its card."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.export.model_card import find_licence


def test_the_licence_of_a_base_is_that_of_its_card(tmp_path: Path) -> None:
    assert find_licence("coopcode-base") == "apache-2.0"
    assert find_licence("Qwen/not-in-the-cache") is None
    assert find_licence(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("no front matter\n")
    assert find_licence(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
    assert find_licence(str(tmp_path)) == "mit"
    (tmp_path / "README.md").write_text("---\nlicense:\n- mit\n- other\nmodel-index: 3\n---\n# base\n")
    assert find_licence(str(tmp_path)) == "mit, other"


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: [mit\n---\n",
        b"---\n{{ card_data }}\n---\n",
        b"---\n- mit\n---\n",
        b"---\nlicense: 2024-13-45\n---\n",
        b"---\nlicense: mit\n---\n# Mod\xe8le\n",
    ],
)
def test_a_base_with_an_unreadable_card_states_no_licence(tmp_path: Path, card: bytes) -> None:
    (tmp_path / "README.md").write_bytes(card)
    assert find_licence(str(tmp_path)) is None
