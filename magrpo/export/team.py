"""The trained team of a run: the checkpoint that others get, its origin, and the names that others use for it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from magrpo.assets import locate_model, name_base
from magrpo.config.agents import AgentConfig
from magrpo.config.run import RunConfig
from magrpo.config.services import NotifyConfig, TrackingConfig
from magrpo.errors import ConfigError
from magrpo.reports.run import RunReport
from magrpo.run.files import checkpoint_weights, committed_iterations, find_evaluations, read_evaluation
from magrpo.run.steps import Step, makes_tables
from magrpo.run.store import Pointer, RunStore


@dataclass(frozen=True)
class TrainedTeam:
    """The agents of a run after its last evaluated iteration. Made by :meth:`of`."""

    store: RunStore
    config: RunConfig
    evaluations: dict[int, Pointer]
    """The evaluations by iteration, ascending; the last one evaluates these agents."""
    merged: bool
    """Whether adapters are merged into copies of their base."""

    @classmethod
    def of(cls, store: RunStore, *, merged: bool = False) -> "TrainedTeam":
        """The agents of a run. Raises ConfigError if it compares baselines, or has no evaluated checkpoint."""
        config = store.config()
        if makes_tables(config):
            raise ConfigError(f"run {store.run_id} compares baselines and has no agents of its own; name a trained run")
        kept = committed_iterations(store, "update")
        evaluations = {i: pointer for i, pointer in find_evaluations(store).items() if i in kept}
        if not evaluations:
            raise ConfigError(
                f"run {store.run_id} has no evaluated agents yet; resume it: {store.format_command('resume')}"
            )
        return cls(store, config, evaluations, merged)

    @property
    def iteration(self) -> int:
        """The iteration after which the agents have these weights."""
        return max(self.evaluations)

    @property
    def evaluation(self) -> Path:
        """The folder of the evaluation of these agents."""
        return self.store.folder(self.evaluations[self.iteration])

    @property
    def weights(self) -> Path:
        """The folder of the checkpoint, with a folder for each agent."""
        return checkpoint_weights(self.store, self.iteration)

    @cached_property
    def report(self) -> RunReport:
        """The evaluations in the form that reports use."""
        reports = [read_evaluation(self.store.folder(pointer)) for pointer in self.evaluations.values()]
        return RunReport(self.store, self.config, reports)

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The precision of training and evaluation, provided that both ran on the same machine; of all but products."""
        if self.config.model.dtype == "mixed":
            return "float32"
        if self.config.model.dtype != "auto":
            return self.config.model.dtype
        return "bfloat16" if self.store.manifest_of(Step("start", 0).output)["metrics"]["start/gpus"] else "float32"

    @cached_property
    def checkpoint(self) -> Pointer:
        """The checkpoint of these agents."""
        found = self.store.find(Step("update", self.iteration).output)
        assert found is not None  # one of those that ``of`` found
        return found

    def describe_origin(self) -> dict[str, object]:
        """The run, checkpoint and evaluation, as plain JSON."""
        return {
            "run": self.store.run_id,
            "iteration": self.iteration,
            "checkpoint": self.checkpoint["sha"],
            "evaluation": self.evaluations[self.iteration]["sha"],
            "merged": self.merged,
        }

    def weights_of(self, agent: AgentConfig) -> Literal["lora", "shared", "full"]:
        """The form of the agent's weights in the export."""
        return "full" if self.merged else agent.weights

    def portable_config(self) -> RunConfig:
        """The configuration without services and folders of the training machine, except those of problems.

        Merged agents are full models.
        """
        agents = [
            agent.model_copy(
                update={"start_from": None, "weights": self.weights_of(agent), "model": name_base(agent.model)}
            )
            for agent in self.config.agents
        ]
        root = RunConfig.model_fields["root"].default
        services = {"tracking": TrackingConfig(), "notify": NotifyConfig()}
        return self.config.model_copy(update={"agents": tuple(agents), "root": root, **services})

    def list_shipped_bases(self) -> list[str]:
        """The bases of adapters that ship with the project, of which others need a copy."""
        bases = {agent.model for agent in self.config.agents if self.weights_of(agent) != "full"}
        return sorted(base for base in bases if locate_model(base) != base)
