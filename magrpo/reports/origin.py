"""The origin of a run (its date, machine and code), and commands to continue with after its report."""

from collections.abc import Iterator
from datetime import UTC, datetime

from magrpo.config.run import RunConfig
from magrpo.run.store import RunStore
from magrpo.sandboxes import LEVEL_TITLES
from magrpo.tracking.connection import mlflow_page, tracking_uri
from magrpo.tracking.outbox import read_outbox


def describe_origin(store: RunStore, config: RunConfig) -> list[tuple[str, str]]:
    """List a run's start, machine, commit, libraries, folder and MLflow page, as far as it recorded them."""
    started, tags = _read_tags(store)
    facts = {"started": started, "machine": tags.get("machine", "")}
    facts["place"] = tags.get("magrpo.config.place", "")
    commit = tags.get("mlflow.source.git.commit", "")
    is_dirty = tags.get("git.dirty") == "true"
    facts["commit"] = f"{commit} with changes" if commit and is_dirty else commit
    versions = {key.removeprefix("version."): tags[key] for key in tags if key.startswith("version.")}
    facts["libraries"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    level = tags.get("sandbox.level", "")
    facts["sandbox"] = LEVEL_TITLES.get(level, level)
    facts["run folder"] = str(store.path)
    command, page = mlflow_page(tracking_uri(config.tracking, store.path.parent), "", "")
    facts["MLflow"] = command or page
    return [(name, text) for name, text in facts.items() if text]


def suggest_commands(store: RunStore, config: RunConfig, program: str = "magrpo") -> Iterator[tuple[str, str]]:
    """Suggest commands for the agents of a run, each after its purpose; the most wanted one comes last."""
    run = store.format_arguments()
    if config.train.num_iterations:
        yield "compare the agents with baselines", f"{program} evaluate {run} --baselines all"
    yield "ask the agents a held-out problem", f"{program} ask {run}"


def _read_tags(store: RunStore) -> tuple[str, dict[str, str]]:
    """Return the time of the first start, and the newest value of every tag; empty for a run without records."""
    started, tags = "", {}
    for record in read_outbox(store.path):
        if record["kind"] == "tags":
            tags.update(record["values"])
        elif not started and record["kind"] == "status":
            started = f"{datetime.fromtimestamp(record['time_ms'] / 1000, UTC):%Y-%m-%d %H:%M} UTC"
    return started, tags
