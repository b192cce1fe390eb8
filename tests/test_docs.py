"""The documents: every relative link leads somewhere, docs/configuration.md is what the classes say, and
docs/metrics.md lists the keys that a run reports, all of them and no others.

``make docs`` writes the page of the configuration.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from magrpo.config import load_config
from magrpo.store import RunStore
from magrpo.tracking import MemoryTracker
from pipelines import chain
from pipelines.config_help import config_help
from pipelines.console import RunConsole
from pipelines.session import Session
from tests.pipelines.micro import write_config

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


METRICS = ROOT / "docs" / "metrics.md"
EVERY_KEY = ["env.num_turns=2", "rollout.branching=2", "rollout.joint_mode=crossed"]
EVERY_KEY += ["algo.update_epochs=2", "algo.beta=0.1", "eval.num_samples=10"]
"""A run with these values reports every key there is."""


def test_metrics_page_lists_the_keys_of_a_run(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, iterations=1), EVERY_KEY)
    store, tracker = RunStore.create(config), MemoryTracker()
    with RunConsole(1, config.reward.max_total) as console, Session(config, store, console, tracker.tags) as session:
        chain.run(config, session, store, tracker)
    manifests = store.path.glob("stages/*/*/_SUCCESS")
    committed = {key for path in manifests for key in json.loads(path.read_text())["metrics"]}
    reported = {key for _, metrics in tracker.history for key in metrics}
    assert reported <= committed
    values = {
        "agent": [agent.name for agent in config.agents],
        "part": list(config.reward.maxima),
        "split": ["train", "test", "ood"],
        "mode": ["sampled", "greedy"],
        "turn": ["1", "2"],
        "k": ["1", "3", "5", "10"],
        "quantity": [key.removeprefix("sandbox/") for key in committed if key.startswith("sandbox/")],
    }
    listed = re.findall(r"^\| `([^`]+)`", METRICS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed)), "a key is listed twice"
    patterns = {key: re.sub(r"<(\w+)>", lambda name: f"({'|'.join(values[name[1]])})", key) for key in listed}
    assert [key for key in committed if not any(re.fullmatch(p, key) for p in patterns.values())] == []
    assert [key for key, p in patterns.items() if not any(re.fullmatch(p, k) for k in committed)] == []


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration_page(), encoding="utf-8")
