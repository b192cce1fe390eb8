"""The description of a run on its MLflow page: what it runs, its results so far, and how to resume it.

Imports no prefect.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from magrpo.config import RunConfig
from magrpo.layout import Step, committed_iterations, read_evaluation
from magrpo.store import RunStore
from magrpo.types import HEADLINE

NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description, in Markdown."""
FLOW_RUN_URL = "prefect.flow_run_url"
"""The tag that leads from a run in MLflow to its flow run."""
_STATES = {
    "RUNNING": "Under way",
    "FINISHED": "Finished",
    "FAILED": "Stopped by an error",
    "KILLED": "Interrupted",
}


def describe_run(store: RunStore, status: str, flow_run_url: str | None = None) -> dict[str, str]:
    """The tags that describe a run as its directory has it now; ``status`` is MLflow's."""
    config = store.config()
    lines = [f"{_what(config)} {_STATES[status]}. {' '.join(_results(store, config))}".strip(), ""]
    lines += [f"- on `{socket.gethostname()}` in `{store.path}`"]
    again = f"magrpo train --resume {store.run_id} --root {store.path.parent}"
    lines += [] if status == "FINISHED" else [f"- to resume it: `{again}`"]
    lines += [f"- [flow run in Prefect]({flow_run_url})"] if flow_run_url else []
    tags = {} if flow_run_url is None else {FLOW_RUN_URL: flow_run_url}
    from_iteration = _first_repeated_iteration(store)
    if from_iteration is not None:
        tags["magrpo.rewound"] = f"from iteration {from_iteration} on"
        lines += [f"- computed again from iteration {from_iteration} on: of two values for a step the later one counts"]
    return tags | {NOTE: "\n".join(lines)}


def _what(config: RunConfig) -> str:
    agents = ", ".join(
        f"`{agent.name}` ({agent.model.rstrip('/').rpartition('/')[2]}, {agent.weights})" for agent in config.agents
    )
    return (
        f"**MAGRPO** on `{config.problems.kind}`, agents {agents}, "
        f"{config.train.num_iterations} iterations, seed {config.train.seed}."
    )


def _results(store: RunStore, config: RunConfig) -> Iterator[str]:
    """The held-out return at the first evaluation and the last."""
    iterations = committed_iterations(store, "evaluate")
    ends = [store.find(Step("evaluate", iteration).folder) for iteration in (*iterations[:1], *iterations[-1:])]
    if not ends or None in ends:
        return  # none yet, or damaged: it will be evaluated again
    first, last = (read_evaluation(store.folder(pointer)) for pointer in ends if pointer is not None)
    value = last.summary[HEADLINE]["return"]
    yield f"Return on held-out problems, of the maximum: **{value.mean:.1%}** [{value.low:.1%}, {value.high:.1%}]"
    yield f"after iteration {last.policy_version} of {config.train.num_iterations}"
    if len(iterations) > 1:
        yield f"(untrained: {first.summary[HEADLINE]['return'].mean:.1%})"


def _first_repeated_iteration(store: RunStore) -> int | None:
    """The earliest iteration of which a stage was set aside, to be computed again."""
    return min((int(path.name) for path in store.path.glob("set-aside/*/*")), default=None)
