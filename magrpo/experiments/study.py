"""Studies: which runs a study has, and what is fixed before the first of them.

The folder ``<root>/studies/<name>`` holds ``study.json``, a copy of everything that was fixed, and ``study.csv``, the
evaluations of all finished runs. A run is finished if its own directory shows it or, once that is deleted, the table
does. :mod:`magrpo.experiments.study_runs` executes the runs.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from magrpo.checks.rewards import can_be_passed
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, count_levels, load_config
from magrpo.config.study import Arm, StudyConfig, StudyRun, name_rate, name_reported_run
from magrpo.config.validate import read_toml, validate_config, write_override
from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.planning.place_check import check_device, check_place
from magrpo.process.environment import shorten_path
from magrpo.reports.study import TABLE, StudiedRun, read_studied_run, read_table
from magrpo.run.comparability import pass_alike, score_alike
from magrpo.run.config_diff import flatten_config, flatten_tree
from magrpo.run.files import is_finished, read_place
from magrpo.run.manifest import digest
from magrpo.run.store import RunStore, check_run_name, name_after, read_json

FIXED = "study.json"
_EVALUATION = ("eval.max_problems", "eval.stop_above", "eval.seed", "rollout.leave_out_long")
"""Keys beside the problems that decide how arms are evaluated, on which of them and with which oracle."""
_LOCATIONS = ("root", "tracking.", "notify.")
"""Beginnings of keys that change no result and may change while a study is under way."""
_MAX_STEPS = 1_000_000  # which every command on a run lists in memory


@dataclass(frozen=True, slots=True)
class Study:
    """A study, read from its file."""

    path: Path
    name: str
    config: StudyConfig
    root: Path
    sources: dict[str, Path]
    """The file of the configuration of each arm."""

    @property
    def folder(self) -> Path:
        return self.root / "studies" / self.name

    @property
    def folder_store(self) -> RunStore:
        """Return the study's folder as a store, which keeps the place for runs that have not begun."""
        return RunStore(self.folder.parent, self.name)

    def find_store(self, run_id: str) -> RunStore:
        return RunStore(self.root, run_id)

    def list_pilots(self) -> list[StudyRun]:
        """List the runs that choose the learning rates; none for an arm with a single candidate."""
        pilots = self.config.pilots
        if pilots is None:
            return []
        return [
            StudyRun(f"{self.name}-{arm.name}-pilot-lr{name_rate(rate)}-s{seed}", arm.name, seed, rate, is_pilot=True)
            for arm in self.config.arms
            if len(self.config.list_rates(arm)) > 1
            for rate in self.config.list_rates(arm)
            for seed in pilots.seeds
        ]

    def list_reported(self, rates: Mapping[str, float | None]) -> list[StudyRun]:
        """List the reported runs, every arm with a seed before the next seed; ``rates``: those chosen so far."""
        arms = [(arm.name, seed) for seed in self.config.seeds for arm in self.config.arms]
        return [
            StudyRun(name_reported_run(self.name, arm, seed), arm, seed, rates.get(arm), is_pilot=False)
            for arm, seed in arms
        ]

    def list_samples(self) -> list[StudyRun]:
        """List one run of each arm, with its first seed and candidate, for checks before anything runs."""
        firsts = [(arm, next(iter(self.config.list_rates(arm)), None)) for arm in self.config.arms]
        return [StudyRun("", arm.name, self.config.seeds[0], rate, is_pilot=False) for arm, rate in firsts]

    def list_samples_left(self) -> list[StudyRun]:
        """List those of :meth:`list_samples` whose arm has runs left, for checks of what only a run needs."""
        unfinished = {run.arm for run in self.list_unfinished()}
        return [run for run in self.list_samples() if run.arm in unfinished]

    def choose_rates(self) -> dict[str, float | None]:
        """Choose the learning rate of each arm by its finished pilots; arms with unfinished pilots are left out."""
        rates: dict[str, float | None] = {}
        for arm in self.config.arms:
            candidates = self.config.list_rates(arm)
            outcomes: dict[float, list[float]] = {rate: [] for rate in candidates}
            pilots = [run for run in self.list_pilots() if run.arm == arm.name]
            if not pilots:
                rates[arm.name] = candidates[0] if candidates else None
                continue
            for run in self._read_finished(pilots):
                assert run.rate is not None, "a pilot tries a rate"
                outcomes[run.rate].append(run.measure(self.config, self.config.pilot_tokens))
            if sum(map(len, outcomes.values())) == len(pilots):
                rates[arm.name] = max(candidates, key=lambda rate: fmean(outcomes[rate]))
        return rates

    def read_finished(self, rates: Mapping[str, float | None]) -> list[StudiedRun]:
        """Read the finished runs, pilots first; ``rates`` are those that :meth:`choose_rates` chose."""
        return self._read_finished([*self.list_pilots(), *self.list_ready(rates)])

    def list_unfinished(self) -> list[StudyRun]:
        """List the pilots and the reported runs that are left to execute."""
        rates = self.choose_rates()
        finished = {run.run_id for run in self.read_finished(rates)}
        return [run for run in [*self.list_pilots(), *self.list_reported(rates)] if run.run_id not in finished]

    def read_remembered(self) -> list[StudiedRun]:
        """Read the runs of the table whose folders are gone, whether or not their arm is ready."""
        return [run for name, run in read_table(self.folder).items() if not self.find_store(name).exists()]

    def list_ready(self, rates: Mapping[str, float | None]) -> list[StudyRun]:
        """List the reported runs of the arms whose rates are known."""
        return [run for run in self.list_reported(rates) if run.arm in rates]

    def is_finished(self, run: StudyRun) -> bool:
        return bool(self._read_finished([run]))

    def _read_finished(self, runs: Sequence[StudyRun]) -> list[StudiedRun]:
        """Read the runs that are finished and have the outcome in all of their evaluations."""
        table = read_table(self.folder)
        found = []
        for run in runs:
            store, known = self.find_store(run.run_id), table.get(run.run_id)
            if is_finished(store):
                if not run.is_pilot:
                    _check_rate(store, run)
                found.append(read_studied_run(store, run))
            elif known is not None and known.rate == run.rate and not store.exists():
                found.append(known)
        return [run for run in found if run.has_quantity(self.config.quantity)]

    def configure_run(self, run: StudyRun) -> RunConfig:
        """Return the configuration of a run. Raises ConfigError if a value is unusable."""
        tokens = self.config.pilot_tokens if run.is_pilot else self.config.tokens
        arm = next(arm for arm in self.config.arms if arm.name == run.arm)
        changes = [*self.config.set, *arm.set, write_override("root", self.root), f"train.seed={run.seed}"]
        changes += [f"train.max_tokens={tokens}"] + ([] if run.rate is None else [f"optim.lr={run.rate!r}"])
        config = self.load_config(arm, changes)
        if run.rate is not None and (own := next((agent for agent in config.agents if agent.lr is not None), None)):
            raise ConfigError(
                f"{self.path}: arm {run.arm!r}: agent {own.name!r} has a learning rate of its own, so the pilots' "
                "would change nothing; remove its lr, or the section pilots"
            )
        # The budget ends training. So many iterations suffice even if every completion has a single token.
        levels = count_levels(config.rollout, config.count_acting())
        completions = sum(completions for completions, _ in levels) * config.rollout.problems_per_iteration
        most = min(math.ceil(tokens / completions), _MAX_STEPS // (2 * config.env.num_turns + 2))
        return config.model_copy(update={"train": config.train.model_copy(update={"num_iterations": most})})

    def load_config(self, arm: Arm, changes: Sequence[str]) -> RunConfig:
        """Load the configuration of an arm with changes; the message of a ConfigError names the arm."""
        try:
            return load_config(self.sources[arm.name], changes)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: arm {arm.name!r}: {error}") from None

    def list_fixed(self) -> dict[str, object]:
        """Return everything that is fixed before the first run, by key: the study's file and its configurations."""
        fixed = flatten_tree(self.config.model_dump(mode="json", exclude_defaults=True))
        given = {self.sources[arm.name]: arm.config or self.config.config for arm in self.config.arms}
        names = [source.name for source in given]
        for source, as_given in given.items():
            title = source.name if names.count(source.name) == 1 else as_given
            tree = flatten_tree(read_toml(source))
            fixed |= {f"{title}: {k}": value for k, value in tree.items() if not k.startswith(_LOCATIONS)}
        return fixed


def _check_rate(store: RunStore, run: StudyRun) -> None:
    """Raise ConfigError if the finished run has another learning rate: its arm must not mix two."""
    trained = store.config().optim.lr
    if run.rate is not None and trained != run.rate:
        raise ConfigError(
            f"run {store.run_id} was trained with optim.lr={trained!r}, but the pilots of its arm now choose "
            f"{run.rate!r}: restore the pilots that it was chosen by, or delete {shorten_path(store.path)} to train it "
            "again"
        )


def load_study(path: Path, name: str | None, root: Path | None, locate: Callable[[str], Path]) -> Study:
    """Read a study and check all its configurations, without writing anything; ``locate`` finds shipped ones.

    Raises ConfigError if a value is unusable, or the arms cannot be compared.
    """
    config = validate_config(StudyConfig, read_toml(path), (), str(path))
    sources = {}
    for arm in config.arms:
        given = arm.config or config.config
        beside = path.parent / given
        sources[arm.name] = beside if beside.is_file() else locate(given)
    study = Study(
        path, check_run_name(name, 60) if name else name_after(path, 60), config, root or Path("runs"), sources
    )
    if root is None:
        first = study.load_config(config.arms[0], [*config.set, *config.arms[0].set])
        study = replace(study, root=first.root)
    configs = [study.configure_run(run) for run in study.list_samples()]
    for arm, other in zip(config.arms, configs, strict=True):
        _check_comparable(study, arm, configs[0], other)
    for run in study.list_pilots():
        study.configure_run(run)
    return study


def _check_comparable(study: Study, arm: Arm, first: RunConfig, other: RunConfig) -> None:
    """Raise ConfigError if an arm lacks the outcome, or cannot be compared with the reference, ``first``."""
    where, reference = f"{study.path}: arm {arm.name!r}", study.config.arms[0].name
    outcome, quantity, can_pass = study.config.outcome, study.config.quantity, can_be_passed(other.reward)
    if quantity == "pass_at_1" and not can_pass:
        raise ConfigError(
            f'{where}: outcome = "{outcome}", but by reward {other.reward.kind!r} no answer passes or fails; set '
            f'outcome = "{outcome.replace(quantity, "return")}"'
        )
    if first.problems != other.problems:
        raise ConfigError(f"{where} has other problems than {reference!r}, so the two cannot be compared")
    values, expected = flatten_config(other), flatten_config(first)
    if key := next((key for key in _EVALUATION if values[key] != expected[key]), None):
        raise ConfigError(
            f"{where} has {key} = {values[key]}, but {reference!r} has {expected[key]}, so the two are not evaluated "
            "alike; set it for all arms alike"
        )
    if quantity == "pass_at_1" and not pass_alike(first, other):
        raise ConfigError(
            f"{where} has another reward.refuse_forgeable than {reference!r}, so the two cannot be compared by pass@1; "
            "give them the same"
        )
    if quantity == "return" and not score_alike(first, other):
        remedy = "give them the same"
        if can_pass and can_be_passed(first.reward) and pass_alike(first, other):
            remedy = f'set outcome = "{outcome.replace(quantity, "pass_at_1")}"'
        raise ConfigError(
            f"{where} has another reward or penalty than {reference!r}, so their returns cannot be compared; {remedy}"
        )


def fix_study(study: Study) -> dict[str, Any]:
    """Write down what the study fixes, or compare it with what was written down before the first run.

    Returns the record: time, digest and content. Raises ConfigError, which names every change, if the two differ.
    """
    path, now = study.folder / FIXED, study.list_fixed()
    if not path.exists():
        taken = [run.run_id for run in [*study.list_reported({}), *study.list_pilots()]]
        if clash := next((name for name in taken if study.find_store(name).exists()), None):
            raise ConfigError(f"run {clash} exists in {study.root}: choose another --name for the study")
        if (table := study.folder / TABLE).exists():
            raise ConfigError(
                f"{table}: no {FIXED} beside it says what was fixed before its runs; copy both, or neither"
            )
        first = {"when": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}", "digest": digest(now), "fixed": now}
        study.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(first, indent=1).encode())
    record: dict[str, Any] = read_json(path)
    if not (isinstance(record, dict) and {"when", "digest", "fixed"} <= record.keys()):
        raise ConfigError(f"{path} is damaged: restore it from a backup")
    then: dict[str, object] = record["fixed"]
    keys = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != json.loads(json.dumps(now.get(key)))]
    if keys:
        changes = "\n".join(f"  {key}: {_show(then, key)} -> {_show(now, key)}" for key in keys)
        raise ConfigError(
            f"{study.path}: study {study.name} was fixed on {record['when']}, before its first run, and has changed:\n"
            f"{changes}\nundo the change, or start another study: --name NAME"
        )
    return record


def _show(values: dict[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(none)"


def check_study_place(study: Study, place: Place | None, *, for_plan: bool = False) -> None:
    """Raise ConfigError if a run of the study that is left cannot run at ``place`` (None: the study's last place).

    A plan requires no GPU here.
    """
    place = place or read_place(study.folder_store)
    for run in study.list_samples_left():
        config = study.configure_run(run)
        check_place(config, place)
        if not for_plan:
            check_device(config, place, is_fixed=(study.folder / FIXED).exists())
