"""After a run: its team becomes a version of a registered model, and the champion if it passes the gate.

A team is promoted if there is no champion, or if the run's last evaluation is better than the champion's
(:mod:`magrpo.training.gate`). Every part can be repeated safely: a version is registered once for a run's weights, and
the decision is committed in the run directory like the output of a stage.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from magrpo.config.run import RunConfig
from magrpo.progress.activity import show_activity
from magrpo.reports.evaluations import mean_returns
from magrpo.reports.figures import format_share
from magrpo.run.comparability import select_protocol
from magrpo.run.files import AGENTS, PROMOTE, REGISTER, describe_start, read_evaluation, split_file
from magrpo.run.manifest import digest
from magrpo.run.store import CONFIG, Pointer, RunStore
from magrpo.tracking.connection import Unavailable, tracking_uri
from magrpo.tracking.model_registry import ModelRegistry, TeamVersion
from magrpo.training.gate import lead_over
from magrpo.training.keys import list_changes, read_prompts
from magrpo.training.loop import Outcome
from magrpo.types import HEADLINE

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
"""File of a version with the returns that the gate compares."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A registered version, and the gate's decision."""

    model: str
    version: int
    promoted: bool
    """Whether the version became the champion."""
    reason: str
    champion: int | None
    """Number of the previous champion; None if there was none."""
    fresh: bool = True
    """Whether this process decided, rather than an earlier process of the same run."""

    def __str__(self) -> str:
        verdict = "is now the champion" if self.promoted else "is registered; the champion stays"
        if not self.fresh:  # another run may have changed the champion since
            verdict = "became the champion" if self.promoted else "was registered; the champion stayed"
        return f"version {self.version} of {self.model} {verdict}: {self.reason}"


def register_team(store: RunStore, outcome: Outcome, mlflow_run_id: str) -> Promotion | None:
    """Register the team of a finished run and ask the gate; None if there is nothing to register, or MLflow is away.

    If MLflow is away, a later call continues.
    """
    config = store.config()
    if config.registry.model is None or not config.train.num_iterations:
        return None
    registry = ModelRegistry(tracking_uri(config.tracking, store.path.parent), config.registry.model)
    try:
        if not mlflow_run_id:
            raise Unavailable("MLflow was not reached")
        candidate = _Candidate(store, config, registry, outcome)
        with show_activity(f"registering the team as a version of {config.registry.model}"):
            registered = candidate.register(mlflow_run_id)
        return candidate.decide_promotion(registered)
    except Unavailable as error:
        log.warning("registry: %s; to register later: %s", error, store.format_command("resume"))
        return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The team of a finished run."""

    store: RunStore
    config: RunConfig
    registry: ModelRegistry
    outcome: Outcome

    def register(self, mlflow_run_id: str) -> Pointer:
        """Register the version and commit a record of it: the files that describe it, and ``version.json``."""
        store, config, registry, outcome = self.store, self.config, self.registry, self.outcome
        last, checkpoint = config.train.num_iterations, outcome.checkpoint

        def write(folder: Path) -> Mapping[str, float]:
            from magrpo.export.model_card import render_model_card, strip_heading  # huggingface_hub
            from magrpo.export.team import TrainedTeam

            version = registry.register_team(mlflow_run_id, store.path / AGENTS, checkpoint["sha"])
            team = TrainedTeam.of(store)
            last_report = team.report.last
            parent = describe_start(store)
            shown = format_share(last_report.summary[HEADLINE]["return"])
            card = render_model_card(team, version.number)
            described = folder / "described"
            described.mkdir()
            (described / "README.md").write_text(card, encoding="utf-8")
            (described / CONFIG).write_text(team.portable_config().resolved(), encoding="utf-8")
            facts = {"protocol": self._protocol(), "returns": mean_returns(last_report, config.reward)}
            (described / EVALUATION).write_text(json.dumps(facts, indent=1), encoding="utf-8")
            # The list of versions shows the first line of this text, so the heading must go.
            text = f"Return on held-out problems: {shown} of the maximum.\n{strip_heading(card)}"
            tags = {"magrpo.run_id": store.run_id, "continued_from": parent, "return": shown}
            registry.describe_version(version, described, text, tags)
            (folder / "version.json").write_text(json.dumps(asdict(version), indent=1), encoding="utf-8")
            return {}

        name = f"{last:05d}/{REGISTER}"
        key = digest("register", registry.model, checkpoint["sha"], outcome.evaluations[last]["sha"])
        return store.find(name, key) or store.commit(name, key, write)

    def _protocol(self) -> str:
        """Digest everything an evaluation depends on except the agents; equal digests allow a comparison by problem."""
        # Differences from the defaults only: an option that a new version adds changes nothing.
        tree = select_protocol({name: list_changes(section) for name, section in self.config})
        changed = {name: section for name, section in tree.items() if section}
        problems = self.store.file_digest(self.outcome.problems, split_file("test"))
        return digest(changed, problems, read_prompts(self.config))

    def decide_promotion(self, registered: Pointer) -> Promotion:
        """Decide once: either the alias moves and the decision is committed, or neither happens."""
        name = f"{self.config.train.num_iterations:05d}/{PROMOTE}"
        key = digest("promote", registered["sha"], self.config.registry.promote)
        committed = self.store.find(name, key)
        if committed is not None:
            self.store.check_files(committed)
            facts = json.loads((self.store.folder(committed) / "promotion.json").read_bytes())
            return Promotion(**facts | {"fresh": False})
        registry = self.registry
        self.store.check_files(registered)
        version = TeamVersion(**json.loads((self.store.folder(registered) / "version.json").read_bytes()))
        while True:
            champion = registry.find_champion()
            promotion = self._judge(version, champion)
            if registry.find_champion() == champion:
                break  # no other run promoted its team meanwhile, so the verdict holds

        def write(folder: Path) -> Mapping[str, float]:
            (folder / "promotion.json").write_text(json.dumps(asdict(promotion), indent=1), encoding="utf-8")
            return {}

        verdict = "promoted" if promotion.promoted else "not promoted"
        before = "none" if promotion.champion is None else str(promotion.champion)
        tags = {"verdict": verdict, "reason": promotion.reason, "champion_before": before}
        try:
            registry.tag_version(version, tags)
            if promotion.promoted:
                registry.set_champion(version.number)
            self.store.commit(name, key, write)
        except BaseException:
            self._put_back(version, promotion)
            raise
        return promotion

    def _put_back(self, version: TeamVersion, promotion: Promotion) -> None:
        """Give the alias back to the champion before ``promotion``, whose decision was not committed."""
        now = self.registry.find_champion()
        if promotion.promoted and now is not None and now.number == version.number:
            self.registry.set_champion(promotion.champion)
        tags = {"verdict": "undone", "reason": "the promotion failed before it was complete"}
        self.registry.tag_version(version, tags)

    def _judge(self, version: TeamVersion, champion: TeamVersion | None) -> Promotion:
        before = None if champion is None else champion.number
        if not self.config.registry.promote:
            promoted, reason = False, "registry.promote is off"
        elif champion is None:
            promoted, reason = True, "there was no champion before"
        elif champion.number == version.number:  # a process of this run was killed just after it moved the alias
            promoted, reason, noted = True, champion.tags["reason"], champion.tags["champion_before"]
            before = None if noted == "none" else int(noted)
        else:
            promoted, reason = self._compare(champion)
        return Promotion(self.registry.model, version.number, promoted, reason, before)

    def _compare(self, champion: TeamVersion) -> tuple[bool, str]:
        """Return whether the team is better than the champion, and a sentence with the figures."""
        theirs = json.loads(self.registry.read_file(champion, EVALUATION))
        if theirs["protocol"] != self._protocol():
            return False, (
                f"version {champion.number} was evaluated under other settings, so the two cannot be compared; keep "
                "eval, env, reward, penalty, sandbox, engine, model and the sampling of rollout as they were, or use "
                "another registry.model"
            )
        evaluation = self.store.folder(self.outcome.evaluations[self.config.train.num_iterations])
        ours = mean_returns(read_evaluation(evaluation), self.config.reward)
        lead = lead_over(ours, theirs["returns"])
        if lead is None:
            return False, f"version {champion.number} shares no evaluated problem with it"
        return lead.passes, f"the return differs from that of version {champion.number} {lead}"
