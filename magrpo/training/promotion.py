"""After a run: its team becomes a version of a registered model, and the champion if it passes the gate.

A team is promoted if there is no champion, or if it is better twice (:mod:`magrpo.training.gate`): in the run's last
evaluation on the champion's held-out problems, sampled alike, and on fresh samples. Every part can be repeated safely:
a version is registered once for a run's weights, evaluations for the gate are runs of their own, and the decision is
committed in the run directory like the output of a stage.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from magrpo.config.run import RunConfig
from magrpo.plugins import ConfigError
from magrpo.progress.activity import show_activity
from magrpo.reports.evaluations import mean_returns
from magrpo.run.files import AGENTS, PROMOTE, REGISTER, WEIGHTS, describe_start, read_evaluation, split_file
from magrpo.run.manifest import digest
from magrpo.run.store import CONFIG, Pointer, RunStore
from magrpo.seeds import derive_seed
from magrpo.tracking.connection import Unavailable, tracking_uri
from magrpo.tracking.model_registry import ModelRegistry, TeamVersion
from magrpo.training.champion import create_challenge, fetch_version
from magrpo.training.gate import CONFIRMATION, FIRST, FRESH_SAMPLES, Lead, lead_over
from magrpo.training.loop import Outcome
from magrpo.types import HEADLINE

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
"""File of a version with the returns that the gate compares."""

Undo = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Makes a context that calls the given function if its block fails."""


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
        return f"version {self.version} of {self.model} {verdict}: {self.reason}"


@contextmanager
def undo_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` if the block fails; the :data:`Undo` of runs without Prefect."""
    try:
        yield
    except BaseException:
        undo()
        raise


def register_team(
    store: RunStore, outcome: Outcome, mlflow_run_id: str, evaluate: Callable[[str], Outcome], undo: Undo
) -> Promotion | None:
    """Register the team of a finished run and ask the gate; None if there is nothing to register, or MLflow is away.

    ``evaluate`` executes a run without iterations in the same root. If MLflow is away, a later call continues.
    """
    config = store.config()
    if config.registry.model is None or not config.train.num_iterations:
        return None
    registry = ModelRegistry(tracking_uri(config.tracking, store.path.parent), config.registry.model)
    try:
        if not mlflow_run_id:
            raise Unavailable("MLflow was not reached")
        candidate = _Candidate(store, config, registry, outcome, evaluate)
        with show_activity(f"registering the team as a version of {config.registry.model}"):
            registered = candidate.register(mlflow_run_id)
        return candidate.decide_promotion(registered, undo)
    except Unavailable as error:
        log.warning("registry: %s; to register later: magrpo resume %s", error, store.run_id)
        return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The team of a finished run. ``evaluate`` executes a run without iterations."""

    store: RunStore
    config: RunConfig
    registry: ModelRegistry
    outcome: Outcome
    evaluate: Callable[[str], Outcome]

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
            mean = last_report.summary[HEADLINE]["return"]
            shown = f"{mean.mean:.1%} [{mean.low:.1%}, {mean.high:.1%}]"
            card = render_model_card(team, version.number)
            returns = mean_returns(last_report, HEADLINE, config.reward)
            described = folder / "described"
            described.mkdir()
            (described / "README.md").write_text(card, encoding="utf-8")
            (described / CONFIG).write_text(team.portable_config().resolved(), encoding="utf-8")
            facts = {"protocol": self._protocol(), "returns": returns}
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
        sections = {"eval", "env", "reward", "penalty", "sandbox", "engine", "model", "rollout"}
        tree = json.loads(self.config.model_dump_json(include=sections))
        del tree["eval"]["every"]
        tree["rollout"] = {key: tree["rollout"][key] for key in ("temperature", "top_p", "top_k", "max_new_tokens")}
        return digest(tree, self.store.file_digest(self.outcome.problems, split_file("test")))

    def decide_promotion(self, registered: Pointer, undo: Undo) -> Promotion:
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

        def put_back() -> None:
            now = registry.find_champion()
            if promotion.promoted and now is not None and now.number == version.number:
                registry.set_champion(promotion.champion)
            registry.tag_version(
                version, {"verdict": "undone", "reason": "the promotion failed before it was complete"}
            )

        verdict = "promoted" if promotion.promoted else "not promoted"
        before = "none" if promotion.champion is None else str(promotion.champion)
        tags = {"verdict": verdict, "reason": promotion.reason, "champion_before": before}
        with undo(put_back):
            registry.tag_version(version, tags)
            if promotion.promoted:
                registry.set_champion(version.number)
            self.store.commit(name, key, write)
        return promotion

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
            try:
                promoted, reason = self._compare(version, champion)
            except ConfigError as error:
                promoted = False
                reason = f"the champion, version {champion.number}, cannot be evaluated here: {error}"
        return Promotion(self.registry.model, version.number, promoted, reason, before)

    def _compare(self, version: TeamVersion, champion: TeamVersion) -> tuple[bool, str]:
        """Return whether the team is better than the champion twice, and a sentence with the figures."""
        theirs, how = self._returns_of(champion)
        own_evaluation = self.outcome.evaluations[self.config.train.num_iterations]
        lead = lead_over(self._read_returns(self.store, own_evaluation), theirs, FIRST)
        if lead is None:
            return False, f"version {champion.number} shares no evaluated problem with it{how}"
        reason = f"the return differs from that of version {champion.number} {lead}{how}"
        if not lead.passes:
            return False, reason
        fresh, how = self._lead_on_fresh_samples(version, champion)
        return fresh is not None and fresh.passes, f"{reason}; on fresh samples {fresh or 'no problem was shared'}{how}"

    def _returns_of(self, champion: TeamVersion) -> tuple[dict[str, float], str]:
        """Return the champion's return on each problem, and a description of the measurement."""
        facts = json.loads(self.registry.read_file(champion, EVALUATION))
        if facts["protocol"] == self._protocol():
            return facts["returns"], ""
        with show_activity(f"fetching the champion, version {champion.number}"):
            folder = fetch_version(self.store, self.registry, champion)
        evaluation = create_challenge(self.store, self.config, folder, champion.number, f"champion-{champion.number}")
        how = f"; the champion was evaluated again for the promotion test, in run {evaluation.run_id}"
        return self._evaluate_again(evaluation), how

    def _lead_on_fresh_samples(self, version: TeamVersion, champion: TeamVersion) -> tuple[Lead | None, str]:
        """Measure the lead over the champion with an unused seed, in one run for each team, made or resumed."""
        ours, theirs = version.number, champion.number
        seed = derive_seed("confirm", self.store.run_id, ours, theirs)
        num_samples = FRESH_SAMPLES * self.config.eval.num_samples
        fresh = self.config.eval.model_copy(update={"seed": seed, "num_samples": num_samples})
        config = self.config.model_copy(update={"eval": fresh})
        weights = self.store.folder(self.outcome.checkpoint) / WEIGHTS
        team = create_challenge(self.store, config, weights, ours, f"version-{ours}-against-{theirs}")
        with show_activity(f"fetching the champion, version {champion.number}"):
            folder = fetch_version(self.store, self.registry, champion)
        other = create_challenge(self.store, config, folder, theirs, f"champion-{theirs}-against-{ours}")
        lead = lead_over(self._evaluate_again(team), self._evaluate_again(other), CONFIRMATION)
        return lead, f", in runs {team.run_id} and {other.run_id}"

    def _evaluate_again(self, run: RunStore) -> dict[str, float]:
        """Return the return on each problem from a run without iterations, executing it unless it is finished."""
        return self._read_returns(run, self.evaluate(run.run_id).evaluations[0])

    def _read_returns(self, run: RunStore, evaluation: Pointer) -> dict[str, float]:
        return mean_returns(read_evaluation(run.folder(evaluation)), HEADLINE, self.config.reward)
