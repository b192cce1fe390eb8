"""Records a run with the tracker: a description, and for each step its metrics, artifacts, datasets and traces."""

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from magrpo.config.run import RunConfig
from magrpo.reports.figures import UNDEFINED, format_difference, format_wall_time
from magrpo.reports.health import list_advice, list_warnings, read_findings
from magrpo.reports.verdict import read_verdict
from magrpo.run import files, steps
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore, merge_metrics, read_records
from magrpo.text import format_count
from magrpo.tracking.mlflow_runs import MlflowTracker
from magrpo.tracking.wall_time import read_wall_time
from magrpo.types import Trajectory

NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description, in Markdown."""
FLOW_RUN_URL = "prefect.flow_run_url"
"""Tag that links a run in MLflow to its flow run."""
_STATES = {"RUNNING": "Under way", "FINISHED": "Finished", "FAILED": "Stopped by an error", "KILLED": "Interrupted"}
ItemT = TypeVar("ItemT")


def describe_run(store: RunStore, status: str, flow_run_url: str | None = None) -> dict[str, str]:
    """Return the tags that describe a run by the current state of its directory; ``status`` is MLflow's term."""
    config = store.config()
    tags: dict[str, str] = {}
    agents = ", ".join(
        f"`{agent.name}` ({agent.model.rstrip('/').rpartition('/')[2]}, {agent.weights})" for agent in config.agents
    )
    iterations = format_count(config.train.num_iterations, "iterations")
    summary = (
        f"**{config.method}** on `{config.problems.kind}`, agents {agents}, {iterations}, "
        f"seed {config.train.seed}. {_STATES[status]}."
    )
    lines = [summary, ""]
    verdict = None if steps.makes_tables(config) else read_verdict(store)
    if verdict is not None:
        tags["verdict"] = verdict.word
        if verdict.gain is not None:
            tags["gain"] = format_difference(verdict.gain)
        lines.append(f"- **{verdict.word}**{verdict.sentence.removeprefix(verdict.word)}")
        findings = read_findings(store)
        lines += [f"- warning: {warning}" for warning in list_warnings(findings, verdict.sentence)]
        lines += [f"- advice: {advice}" for advice in list_advice(findings, verdict.advice)]
    place = files.read_place(store)
    at = "" if place.is_default else f", place: {place.describe()}"
    lines += [f"- on `{socket.gethostname()}` in `{store.path}`{at}"]
    if status == "FINISHED":
        wall_time = read_wall_time(store.path)
        if wall_time is not None:
            lines.append(f"- took {format_wall_time(wall_time)}")
    else:
        lines.append(f"- resume with: `{store.format_command('resume', from_anywhere=True)}`")
    if flow_run_url:
        lines.append(f"- [flow run in Prefect]({flow_run_url})")
        tags[FLOW_RUN_URL] = flow_run_url
    first_repeated = min(
        (int(path.name) for path in store.path.glob("set-aside/*/*") if path.name.isdecimal()), default=None
    )
    if first_repeated is not None:
        tags["magrpo.rewound"] = f"from iteration {first_repeated} on"
        lines.append(
            f"- computed again from iteration {first_repeated} on: where a step has two values, the later one counts"
        )
        # MLflow would keep what an evaluation that was set aside had found.
        tags = {"verdict": UNDEFINED, "gain": UNDEFINED} | tags
    return tags | {NOTE: "\n".join(lines)}


class RunRecorder:
    """Records each committed step. ``on_evaluation`` is called after every evaluation."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        tracker: MlflowTracker,
        on_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._store, self._tracker = config, store, tracker
        self._on_evaluation = on_evaluation
        self._checkpoint: Pointer | None = None
        self._metrics: dict[str, float] = {}
        """Metrics of the current iteration so far."""

    def end_training(self, config: RunConfig) -> None:
        """Take the configuration of a run whose training ends before the planned iteration."""
        self._config = config

    def record_step(self, step: Step, pointer: Pointer) -> None:
        """Record a committed step; metrics are recorded once per iteration."""
        store, tracker = self._store, self._tracker
        folder = store.folder(pointer)
        if step.stage == "prepare":
            for split, path in files.split_files(folder).items():
                context = "training" if split == "train" else "evaluation"
                sha = store.file_digest(pointer, path.name)
                tracker.dataset(f"{self._config.problems.kind} {split}", path, sha, context)
            tracker.artifact(folder, "problems")
        elif step.stage == "start":
            self._checkpoint = pointer
        elif step.stage in ("report", "tables"):
            tracker.metrics(store.metrics(pointer), step.iteration)
            for path in sorted(folder.glob("*.*")):
                tracker.artifact(path, "" if path.suffix == ".html" else "report")
        else:
            merge_metrics(self._metrics, store.metrics(pointer))
            if step.stage == "update":
                self._checkpoint = pointer
            else:
                tracker.artifact(folder, pointer["dir"])
        if step.stage == "evaluate":
            assert self._checkpoint is not None
            tracker.artifact(store.folder(self._checkpoint) / files.WEIGHTS, f"checkpoints/{step.iteration:05d}")
            self._trace_evaluation(step.iteration, pointer)
            self._on_evaluation()
        if step.stage == "evaluate" or (
            step.stage == "update" and not steps.evaluates_after(self._config, step.iteration)
        ):
            self._finish_iteration(step.iteration)
        elif step.stage == "baseline":
            self._finish_iteration([row.name for row in self._config.baselines.rows].index(step.part))

    def _finish_iteration(self, number: int) -> None:
        self._tracker.metrics(self._metrics, number)
        self._metrics = {}

    def _trace_evaluation(self, iteration: int, evaluation: Pointer) -> None:
        """Record the first sampled trajectory of some held-out problems, the same ones at every evaluation of a run."""
        if not self._config.tracking.traces:
            return
        trajectories = read_records(self._store.folder(evaluation) / files.TRAJECTORIES, Trajectory)
        sampled = [t for t in trajectories if (t.split, t.mode) == ("test", "sampled")]
        interval = self._store.work_interval(evaluation)
        for trajectory in spread_evenly(sampled, self._config.tracking.traces):
            self._tracker.trace(trajectory, iteration, interval)


def spread_evenly(items: Sequence[ItemT], count: int) -> Sequence[ItemT]:
    """Return at most ``count`` of the items, evenly spaced, starting with the first."""
    return items[:: max(1, len(items) // count)][:count]
