"""After a run: its team becomes a version of a registered model, and the champion if it passes the gate.

The gate compares the run's last evaluation with the champion's on the same held-out problems, sampled alike; if the
team is better, both are evaluated again on fresh samples (:mod:`pipelines.training.gate`). A team is promoted if it is
better both times, or if there is no champion. Every part can be repeated safely: a version is registered once for a
run's weights, evaluations for the gate are runs of their own, and the decision is committed in the run directory like
the output of a stage.

Imports no prefect.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from magrpo.config import RunConfig
from magrpo.layout import WEIGHTS, read_evaluation, split_file
from magrpo.plugins import ConfigError
from magrpo.reports.evaluations import mean_returns
from magrpo.seeds import derive_seed
from magrpo.store import CONFIG, Pointer, RunStore, digest
from magrpo.tracking.connection import tracking_uri
from magrpo.tracking.model_registry import ModelRegistry, TeamVersion
from magrpo.tracking.provenance import collect_provenance
from magrpo.tracking.spool import Unavailable
from magrpo.types import HEADLINE
from pipelines.training.champion import create_challenge, describe_start, fetch_version
from pipelines.training.gate import CONFIRMATION, FIRST, FRESH_SAMPLES, Lead, lead_over
from pipelines.training.loop import Outcome

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
"""The file of a version with what the gate compares."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")

Undo = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Makes a context that calls a function if its block fails."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A registered version, and the gate's decision."""

    model: str
    version: int
    promoted: bool
    """Whether it became the champion."""
    reason: str
    champion: int | None
    """The version that was the champion before."""
    fresh: bool = True
    """Whether this process decided, not an earlier process of the same run."""

    def __str__(self) -> str:
        verdict = "is the champion now" if self.promoted else "is registered, the champion stays"
        return f"version {self.version} of {self.model} {verdict}: {self.reason}"


@contextmanager
def undo_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """The :data:`Undo` of runs without Prefect."""
    try:
        yield
    except BaseException:
        undo()
        raise


def register_team(
    store: RunStore, outcome: Outcome, mlflow_run_id: str, evaluate: Callable[[str], Outcome], undo: Undo
) -> Promotion | None:
    """Register the team of a finished run and ask the gate; None: nothing to register, or MLflow is away.

    ``evaluate`` executes a run of no iterations in the same root. If MLflow is away, a later call continues.
    """
    config = store.config()
    if config.registry.model is None or not config.train.num_iterations:
        return None
    registry = ModelRegistry(tracking_uri(config.tracking, store.path.parent), config.registry.model)
    try:
        if not mlflow_run_id:
            raise Unavailable("MLflow was not reached")
        registered = _register(store, config, outcome, registry, mlflow_run_id)
        return _Gate(store, config, registry, outcome, registered, evaluate).decide_promotion(undo)
    except Unavailable as error:
        log.warning("registry: %s; to continue: magrpo train --resume %s", error, store.run_id)
        return None


# ------------------------------------------------------------------------------------------------------- registration
def _register(
    store: RunStore, config: RunConfig, outcome: Outcome, registry: ModelRegistry, mlflow_run_id: str
) -> Pointer:
    """The committed record of the version: the files that describe it, and ``version.json``."""
    last = config.train.num_iterations
    checkpoint, evaluation = outcome.checkpoint, outcome.evaluations[last]

    def write(folder: Path) -> Mapping[str, float]:
        from magrpo.reports.model_card import render_model_card, strip_heading  # huggingface_hub

        version = registry.register_team(mlflow_run_id, store.folder(checkpoint) / WEIGHTS, checkpoint["sha"])
        reports = [
            read_evaluation(store.folder(outcome.evaluations[iteration])) for iteration in sorted(outcome.evaluations)
        ]
        returns = mean_returns(reports[-1], HEADLINE, config.reward)
        parent, mean = describe_start(store), reports[-1].summary[HEADLINE]["return"]
        shown = f"{mean.mean:.1%} [{mean.low:.1%}, {mean.high:.1%}]"
        card = render_model_card(store, version.number, parent, reports, outcome.problems, collect_provenance())
        described = folder / "described"
        described.mkdir()
        (described / "README.md").write_text(card, encoding="utf-8")
        (described / CONFIG).write_text(config.resolved(), encoding="utf-8")
        facts = {"protocol": _protocol(store, config, outcome.problems), "returns": returns}
        (described / EVALUATION).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        # The list of versions shows the first line of this, so no heading.
        text = f"Return on held-out problems: {shown} of the maximum.\n{strip_heading(card)}"
        tags = {"magrpo.run_id": store.run_id, "continued_from": parent, "return": shown}
        registry.describe_version(version, described, text, tags)
        (folder / "version.json").write_text(json.dumps(asdict(version), indent=1), encoding="utf-8")
        return {}

    name = f"{last:05d}/register"
    key = digest("register", registry.model, checkpoint["sha"], evaluation["sha"])
    return store.find(name, key) or store.commit(name, key, write)


def _protocol(store: RunStore, config: RunConfig, problems: Pointer) -> str:
    """A digest of everything an evaluation depends on except the agents; equal ones compare problem by problem."""
    sections = {"eval", "env", "reward", "sandbox", "engine", "model", "rollout"}
    tree = json.loads(config.model_dump_json(include=sections))
    del tree["eval"]["every"]
    tree["rollout"] = {key: tree["rollout"][key] for key in _SAMPLING}
    return digest(tree, store.file_digest(problems, split_file("test")))


# --------------------------------------------------------------------------------------------------------------- gate
@dataclass(frozen=True, slots=True)
class _Gate:
    store: RunStore
    config: RunConfig
    registry: ModelRegistry
    outcome: Outcome
    registered: Pointer
    evaluate: Callable[[str], Outcome]

    def decide_promotion(self, undo: Undo) -> Promotion:
        """Decide once: either the alias moves and the decision is committed, or neither happens."""
        name = f"{self.config.train.num_iterations:05d}/promote"
        key = digest("promote", self.registered["sha"], self.config.registry.promote)
        committed = self.store.find(name, key)
        if committed is not None:
            facts = json.loads((self.store.folder(committed) / "promotion.json").read_text(encoding="utf-8"))
            return Promotion(**{**facts, "fresh": False})
        version, registry = self._version(), self.registry
        champion = registry.find_champion()
        promotion = self._judge(version, champion)
        while registry.find_champion() != champion:  # another run promoted its team while this one was judged
            champion = registry.find_champion()
            promotion = self._judge(version, champion)

        def write(folder: Path) -> Mapping[str, float]:
            (folder / "promotion.json").write_text(json.dumps(asdict(promotion), indent=1), encoding="utf-8")
            return {}

        def put_back() -> None:
            now = registry.find_champion()
            if promotion.promoted and now is not None and now.number == version.number:
                registry.set_champion(promotion.champion)
            registry.tag_version(version, {"verdict": "undone", "reason": "the promotion failed on its way"})

        with undo(put_back):
            registry.tag_version(version, _verdict(promotion))
            if promotion.promoted:
                registry.set_champion(version.number)
            self.store.commit(name, key, write)
        return promotion

    def _version(self) -> TeamVersion:
        path = self.store.folder(self.registered) / "version.json"
        return TeamVersion(**json.loads(path.read_text(encoding="utf-8")))

    def _judge(self, version: TeamVersion, champion: TeamVersion | None) -> Promotion:
        def verdict(promoted: bool, reason: str) -> Promotion:
            before = None if champion is None else champion.number
            return Promotion(self.registry.model, version.number, promoted, reason, before)

        if not self.config.registry.promote:
            return verdict(False, "registry.promote is off")
        if champion is None:
            return verdict(True, "there was none before")
        if champion.number == version.number:  # a process of this run was killed just after the alias moved
            before = champion.tags["champion_before"]
            again = verdict(True, champion.tags["reason"])
            return replace(again, champion=None if before == "none" else int(before))
        try:
            return verdict(*self._compare(version, champion))
        except ConfigError as error:
            return verdict(False, f"the champion, version {champion.number}, cannot be evaluated here: {error}")

    def _compare(self, version: TeamVersion, champion: TeamVersion) -> tuple[bool, str]:
        """Whether the team is better than the champion, twice, and a sentence with the figures."""
        theirs, how = self._returns_of(champion)
        lead = lead_over(self._own_returns(), theirs, FIRST)
        if lead is None:
            return False, f"version {champion.number} has no evaluated problem in common with it{how}"
        reason = f"the return differs from that of version {champion.number} {lead}{how}"
        if not lead.passes:
            return False, reason
        fresh, how = self._lead_on_fresh_samples(version, champion)
        return fresh is not None and fresh.passes, f"{reason}; on fresh samples {fresh or 'of no problem'}{how}"

    def _own_returns(self) -> dict[str, float]:
        report = read_evaluation(self.store.folder(self.outcome.evaluations[self.config.train.num_iterations]))
        return mean_returns(report, HEADLINE, self.config.reward)

    def _returns_of(self, champion: TeamVersion) -> tuple[dict[str, float], str]:
        """The champion's return on each problem, and how it was measured."""
        facts = json.loads(self.registry.read_file(champion, EVALUATION))
        if facts["protocol"] == _protocol(self.store, self.config, self.outcome.problems):
            return facts["returns"], ""
        folder = fetch_version(self.store, self.registry, champion)
        evaluation = create_challenge(self.store, self.config, folder, champion.number, f"champion-{champion.number}")
        how = f"; the champion was evaluated again for this, in run {evaluation.run_id}"
        return self._evaluated(evaluation), how

    def _lead_on_fresh_samples(self, version: TeamVersion, champion: TeamVersion) -> tuple[Lead | None, str]:
        """The team's lead over the champion with a seed no evaluation has used, and where it was measured.

        Each is evaluated in a run of its own; a run begun by an earlier process is resumed.
        """
        asked = self.config.eval
        seed = derive_seed("confirm", self.store.run_id, version.number, champion.number)
        fresh = asked.model_copy(update={"seed": seed, "num_samples": FRESH_SAMPLES * asked.num_samples})
        config = self.config.model_copy(update={"eval": fresh})
        ours, theirs = version.number, champion.number
        weights = self.store.folder(self.outcome.checkpoint) / WEIGHTS
        team = create_challenge(self.store, config, weights, ours, f"version-{ours}-against-{theirs}")
        folder = fetch_version(self.store, self.registry, champion)
        other = create_challenge(self.store, config, folder, theirs, f"champion-{theirs}-against-{ours}")
        lead = lead_over(self._evaluated(team), self._evaluated(other), CONFIRMATION)
        return lead, f", in runs {team.run_id} and {other.run_id}"

    def _evaluated(self, run: RunStore) -> dict[str, float]:
        """The return on each problem in a run of no iterations, which is executed unless it is finished."""
        report = read_evaluation(run.folder(self.evaluate(run.run_id).evaluations[0]))
        return mean_returns(report, HEADLINE, self.config.reward)


def _verdict(promotion: Promotion) -> dict[str, str]:
    return {
        "verdict": "promoted" if promotion.promoted else "not promoted",
        "reason": promotion.reason,
        "champion_before": "none" if promotion.champion is None else str(promotion.champion),
    }
