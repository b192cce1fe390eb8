"""The documents: every relative link leads somewhere, and docs/configuration.md is what the classes say.

``make docs`` writes that page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.config_help import config_help

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("infra/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


CONFIGURATION = ROOT / "docs" / "configuration.md"


def configuration_page() -> str:
    return f"""# Configuration

Written by `make docs` from the classes that define the keys; `magrpo train --help` prints the same.

A run is one TOML file ([`pipelines/configs/`](../pipelines/configs) holds examples). `section.key=value` on the command
line changes one value; a list index is a number, as in `agents.0.model=...`. A section with a `kind` is a plug-in: the
name chooses it, its other keys are its fields.

```
{config_help()}
```
"""


def test_configuration_page_is_current() -> None:
    assert CONFIGURATION.read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration_page(), encoding="utf-8")
