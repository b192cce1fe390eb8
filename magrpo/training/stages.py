"""The stages bound to one run: a step finds its output committed, or computes and commits it.

Inputs and outputs are pointers to committed outputs. Policy, engine and sandbox open when a stage first needs them, so
a run whose steps are all committed opens nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

from magrpo.config.run import EvalConfig, RunConfig
from magrpo.engines import EngineError
from magrpo.interfaces import Progress, Served
from magrpo.process.faults import name_full_disk
from magrpo.progress.console import RunConsole
from magrpo.run import layout
from magrpo.run.layout import StageName, Step
from magrpo.run.store import Pointer, RunStore, digest, write_records
from magrpo.sandboxes import LEVEL_TITLES, SandboxDied
from magrpo.sandboxes.notable_executions import write_notable_executions
from magrpo.seeds import derive_seed
from magrpo.stages.answers import answer_metrics
from magrpo.stages.backend import Backend, Cache, Splits, Team
from magrpo.stages.baseline import baseline, count_votes, time_answers
from magrpo.stages.evaluate import evaluate, spread_problems
from magrpo.stages.prepare import Room, draw_problems, prepare
from magrpo.stages.rollout import child_nodes, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.text import encode_json
from magrpo.training.repair import check_kept
from magrpo.training.resources import Resources
from magrpo.types import HEADLINE, EvalReport, Problem, RolloutGroup, Split, T, Turn

Metrics = Mapping[str, float]
_NUM_SAMPLES = "credit/samples"


class StepAborted(BaseException):
    """The run ends before a step that another thread computes. No error of the step: nothing tries it again."""


class StageRunner(AbstractContextManager["StageRunner"]):
    """Runs the steps of one run directory. ``set_tags`` records tags of the run."""

    def __init__(
        self, config: RunConfig, store: RunStore, progress: RunConsole, set_tags: Callable[[Mapping[str, str]], None]
    ) -> None:
        self._config, self._store = config, store
        self._progress, self._set_tags = progress, set_tags
        self._resources = Resources(config, store, self._announce_isolation, progress.show_loading)
        self._reports: Cache = {}
        self._problems: dict[Split, list[Problem]] = {}
        self._drafted: dict[Path, list[Any]] = {}
        """Groups of nodes by the folder that they were written into, until it is committed."""
        self._fresh: dict[str, list[Any]] = {}
        """Groups of nodes that this process has committed, by the digest of their pointer. Nobody changes them."""
        self._advances: dict[Step, Progress] = {}
        """Reports progress within each step under way."""
        self._aborted = False

    def __exit__(self, *_: object) -> None:
        self.abort_steps()

    def abort_steps(self) -> None:
        """Close engine and sandbox, end the steps in progress in other threads with StepAborted, and let none begin."""
        self._aborted = True
        self._resources.close()

    def run_step(self, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        """The committed output of ``step``, computed if need be; a :data:`magrpo.training.loop.RunStep`."""
        key = self._key(step, inputs)
        found = self._store.find(step.folder, key)
        pointer = found or self._compute(step, inputs, key)
        if step.stage in ("start", "update") and not found:
            self._resources.updates.adopt(self._store.folder(pointer))
        if step.stage == "update":
            self._prune(step.iteration)
        self._progress.finish_step(step, self._store.metrics(pointer), reused=found is not None)
        return pointer

    def _prune(self, newest: int) -> None:
        """Delete what nothing needs of earlier checkpoints that are not evaluated."""
        keep, train = self._config.optim.keep, self._config.train
        old = {newest - keep: [layout.OPTIMIZER, layout.OPTIMIZER_SHARDS]}
        if train.keep_weights == "evaluated":  # the rollout of iteration k samples from checkpoint k - 1 - lag
            old.setdefault(newest - max(keep, train.lag + 1), []).append(layout.WEIGHTS)
        for iteration, names in old.items():
            if iteration > 0 and not layout.evaluates_after(self._config, iteration):
                self._store.prune(Step("update", iteration).folder, *names)

    def _key(self, step: Step, inputs: Sequence[Pointer]) -> str:
        """Digest of everything the output depends on: sections of the configuration, and inputs."""
        _, names = _STAGES[step.stage]
        sections = json.loads(self._config.model_dump_json(include=set(names)))
        for section, defaults in _NOT_IN_KEYS.items():
            for name, default in defaults.items():
                if section in sections and sections[section][name] == default:
                    del sections[section][name]
        if "train" in sections and self._config.optim.schedule == "constant":
            del sections["train"]["num_iterations"]  # else the learning rate depends on it
        return digest(step.name, step.iteration, sections, [pointer["sha"] for pointer in inputs])

    def _compute(self, step: Step, inputs: Sequence[Pointer], key: str) -> Pointer:
        self._check_aborted()
        check_kept(self._store, step, inputs)
        discarded_before = self._resources.num_discarded.copy()
        advance = self._progress.start_step(step)

        def advance_or_abort(finished: int) -> None:
            self._check_aborted()
            advance(finished)

        self._advances[step] = advance_or_abort
        writer, _ = _STAGES[step.stage]
        groups: list[Any] | None = None

        def write(folder: Path) -> Metrics:
            nonlocal groups
            started = perf_counter()
            with name_full_disk(folder):
                metrics = writer(self, step, inputs, folder)
            groups = self._drafted.pop(folder, None)
            return {**metrics, f"time/{step.name.partition('.')[0]}_s": perf_counter() - started}

        try:
            pointer = self._store.commit(step.folder, key, write)
        except (EngineError, SandboxDied, BrokenExecutor) as error:
            self._check_aborted()
            self._resources.discard_dead(error, discarded_before)
            raise
        finally:
            del self._advances[step]
        if groups is not None:
            self._fresh[pointer["sha"]] = groups
        return pointer

    def _check_aborted(self) -> None:
        if self._aborted:
            raise StepAborted("the run ends")

    # ------------------------------------------------------------------------------------------------------- stages
    def _prepare(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        config, room = self._config, Room.of(self._config, self._resources.lineup)
        if unused := self._resources.lineup.find_unused_templates():
            self._progress.say(f"warning: {unused}")
        splits = prepare(config.problems, config.rollout.problems_per_iteration, room, config.rollout.leave_out_long)
        for split, problems in splits.items():
            write_records(folder / layout.split_file(split), problems)
        return {f"problems/{split}": float(len(problems)) for split, problems in splits.items()}

    def _start(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Write checkpoint 0, the untrained weights."""
        self._resources.updates.begin(folder)
        return {"start/gpus": float(self._resources.lineup.device.type == "cuda")}

    def _rollout(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Sample one level of the trees, with the weights of a checkpoint."""
        config, iteration = self._config, step.iteration
        problems, checkpoint, *parents = inputs
        seed = derive_seed(config.train.seed, "rollout", iteration, int(step.part))
        if parents:
            nodes = child_nodes(self._read_groups(parents[0], layout.read_scored), config.rollout, seed)
        else:
            train = self._load_problems(problems)["train"]
            drawn = draw_problems(train, iteration, config.rollout.problems_per_iteration, config.train.seed)
            nodes = root_nodes(drawn, config.rollout)
        groups: list[RolloutGroup[Turn]] = []
        self._progress.expect_items(sum(node.group_size * self._num_acting(len(node.history)) for node in nodes))
        if nodes:
            backend = self._backend(step, self._resources.serve_checkpoint(checkpoint))
            groups = rollout(nodes, Team.of(config), backend, config.rollout, seed)
        write_records(folder / layout.GROUPS, groups)
        self._drafted[folder] = groups
        actions = [action for group in groups for of_agent in group.actions.values() for action in of_agent]
        tokens = sum(len(action.token_ids) for action in actions)
        cut_off = sum(action.finish_reason == "length" for action in actions)
        lag = (
            {"rollout/lag": float(iteration - 1 - layout.checkpoint_iteration(checkpoint))} if config.train.lag else {}
        )
        return (
            answer_metrics(groups)
            | lag
            | {
                "rollout/groups": float(len(groups)),
                "rollout/joint_actions": float(sum(len(group.turns) for group in groups)),
                "rollout/tokens": float(tokens),
                "rollout/response_tokens": tokens / len(actions) if actions else 0.0,
                "rollout/cut_off_frac": cut_off / len(actions) if actions else 0.0,
            }
        )

    def _score(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Run the programs in the sandbox and score every joint action."""
        groups = self._read_groups(inputs[0], layout.read_groups, last=True)
        team, sandbox = Team.of(self._config), self._resources.sandbox
        advance, workers = self._advances[step], self._resources.workers
        scored, stats = score(groups, team, sandbox, self._reports, advance, workers)
        layout.write_scores(folder, scored)
        self._drafted[folder] = scored
        write_notable_executions(folder / layout.NOTABLE_EXECUTIONS, stats.ran)
        metrics = stats.metrics()
        if metrics["sandbox/forgeable_frac"]:
            share = f"{metrics['sandbox/forgeable_frac']:.1%}"
            self._progress.say(f"{share} of the programs that ran could forge their verdicts (docs/sandbox.md)")
        return metrics

    def _credit(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Compute the return and the advantage of every completion."""
        from magrpo.stages.credit import credit  # torch

        config = self._config
        samples, metrics = credit(
            [group for pointer in inputs for group in self._read_groups(pointer, layout.read_scored, last=True)],
            config.algo,
            [agent.name for agent in config.agents],
            config.own_estimators,
            rollout=config.rollout,
            num_turns=config.env.num_turns,
        )
        for name, samples_of_agent in samples.items():
            write_records(folder / layout.samples_file(name), samples_of_agent)
        num_trained = sum(len(samples[agent.name]) for agent in config.agents if agent.trained)
        return {**metrics, _NUM_SAMPLES: float(num_trained)}

    def _update(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Update every trained agent; write its weights and the optimizer's state."""
        samples, checkpoint = inputs
        self._progress.expect_items(int(self._store.metrics(samples).get(_NUM_SAMPLES, 0)))
        self._resources.free_gpus()
        of_samples, of_checkpoint = self._store.folder(samples), self._store.folder(checkpoint)
        return self._resources.updates.update(of_samples, of_checkpoint, folder, self._advances[step])

    def _evaluate(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Evaluate a checkpoint on problems never trained on."""
        config = self._config
        problems, checkpoint = inputs
        backend = self._backend(step, self._resources.serve_checkpoint(checkpoint))
        splits, eval_config = self._load_problems(problems), config.seeded_eval()
        self._progress.expect_items(self._count_evaluated(splits, eval_config))
        report, trajectories = evaluate(Team.of(config), backend, splits, eval_config, config.rollout, step.iteration)
        write_records(folder / layout.TRAJECTORIES, trajectories)
        metrics = _write_evaluation(folder, report, backend)
        others = {name: summary["return"] for name, summary in report.summary.items() if name != HEADLINE}
        metrics |= {f"{name}/return": interval.mean for name, interval in others.items()}
        return {f"eval/{key}": value for key, value in metrics.items()}

    def _baseline(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Evaluate one row of the table of baselines. A row that votes spends the tokens of the costliest other row."""
        config = self._config
        problems, untrained, *earlier = inputs
        row = next(row for row in config.baselines.rows if row.name == step.part)
        votes = 1
        if row.votes != "none":
            votes = count_votes(
                {p["dir"].partition("baseline.")[2]: layout.read_evaluation(self._store.folder(p)) for p in earlier},
                voter="single",
            )
        backend = self._backend(step, self._resources.serve_row(row, untrained))
        splits, eval_config = self._load_problems(problems), config.seeded_eval()
        report = baseline(row, backend, splits, eval_config, config.rollout, votes)
        evaluated = spread_problems(splits["test"], eval_config.max_problems)
        to_time = spread_problems(evaluated, config.baselines.timed_problems)
        timed = time_answers(row, backend, to_time, eval_config, config.rollout, votes)
        write_records(folder / layout.TIMED_ANSWERS, timed)
        metrics = _write_evaluation(folder, report, backend) | {"votes": float(votes)}
        return {f"baseline/{row.name}/{key}": value for key, value in metrics.items()}

    def _report(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Write the closing tables and pictures."""
        from magrpo.reports.run import RunReport  # matplotlib

        reports = [layout.read_evaluation(self._store.folder(pointer)) for pointer in inputs]
        RunReport(self._store.run_id, self._store, self._config, reports).write_files(folder)
        before, after = (report.summary[HEADLINE]["return"].mean for report in (reports[0], reports[-1]))
        return {"report/return_gain": after - before}

    def _tables(self, step: Step, inputs: Sequence[Pointer], folder: Path) -> Metrics:
        """Write the tables of a run of baselines."""
        from magrpo.reports.baselines import BaselineTable, read_baselines  # matplotlib

        BaselineTable(self._config, read_baselines(self._store, self._config)).write_files(folder)
        return {}

    # ------------------------------------------------------------------------------------------------------ plumbing
    def _read_groups(
        self, pointer: Pointer, read: Callable[[Path], list[RolloutGroup[T]]], *, last: bool = False
    ) -> list[RolloutGroup[T]]:
        """The nodes of a committed step: those this process wrote, else read from the file. ``last``: to forget them.

        Steps in several threads may call it: each operation on the dict is atomic.
        """
        fresh = self._fresh.pop(pointer["sha"], None) if last else self._fresh.get(pointer["sha"])
        return read(self._store.folder(pointer)) if fresh is None else fresh

    def _announce_isolation(self, level: str) -> None:
        self._progress.say(f"sandbox: {LEVEL_TITLES.get(level, level)}")
        self._set_tags({"sandbox.level": level})

    def _backend(self, step: Step, engine: Served) -> Backend:
        sandbox, render, progress = self._resources.sandbox, self._resources.lineup.render, self._advances[step]
        return Backend(engine=engine, sandbox=sandbox, render=render, cache=self._reports, progress=progress)

    def _num_acting(self, turn: int) -> int:
        """Number of agents that answer at ``turn``, from 0."""
        acting = self._config.env.acting(turn)
        return sum(agent.role in acting for agent in self._config.agents)

    def _count_evaluated(self, splits: Splits, config: EvalConfig) -> int:
        """Number of completions of an evaluation; 0 if trajectories may end early."""
        if config.stop_above is not None:
            return 0
        held_out = (problems for split, problems in splits.items() if split != "train")
        num_problems = sum(len(spread_problems(problems, config.max_problems)) for problems in held_out)
        each = sum(map(self._num_acting, range(self._config.env.num_turns)))
        return num_problems * each * (config.num_samples + 1)  # and a greedy one

    def _load_problems(self, problems: Pointer) -> dict[Split, list[Problem]]:
        if not self._problems:
            self._problems = layout.read_problems(self._store.folder(problems))
        return self._problems


_Writer = Callable[[StageRunner, Step, Sequence[Pointer], Path], Metrics]
_POLICY = ("agents", "model", "lora", "train")
_STAGES: Mapping[StageName, tuple[_Writer, Sequence[str]]] = {
    "prepare": (StageRunner._prepare, ("problems", "rollout")),
    "start": (StageRunner._start, (*_POLICY, "optim", "algo")),
    "rollout": (StageRunner._rollout, (*_POLICY, "env", "engine", "rollout")),
    "score": (StageRunner._score, ("reward", "sandbox")),
    "credit": (StageRunner._credit, ("algo", "agents", "env", "rollout")),
    "update": (StageRunner._update, (*_POLICY, "optim", "algo")),
    "evaluate": (StageRunner._evaluate, ("eval", "env", "reward", "sandbox", "engine", "rollout")),
    "baseline": (StageRunner._baseline, ("baselines", "eval", "sandbox", "engine", "model", "lora", "rollout")),
    "report": (StageRunner._report, ("reward", "agents")),
    "tables": (StageRunner._tables, ("baselines",)),
}
"""What writes the output of each stage into a folder and returns its metrics, and the sections of the configuration
that the output depends on, besides its inputs."""

_NOT_IN_KEYS: Mapping[str, Mapping[str, object]] = {
    "algo": {"max_sampling_gap": None},
    "optim": {"lanes": 1, "keep": 1},
    "rollout": {"leave_out_long": False},
    "train": {"lag": 0, "keep_weights": "all"},
}
"""Defaults left out of stage keys, so that adding an option does not invalidate existing runs; by section."""


def _write_evaluation(folder: Path, report: EvalReport, backend: Backend) -> dict[str, float]:
    """Write the report and the notable executions; returns the metrics that every evaluation has."""
    write_notable_executions(folder / layout.NOTABLE_EXECUTIONS, backend.stats.ran)
    (folder / layout.EVALUATION).write_bytes(encode_json(report))
    metrics = {key: interval.mean for key, interval in report.summary[HEADLINE].items()}
    return metrics | {"sandbox/infra_error_frac": backend.stats.metrics()["sandbox/infra_error_frac"]}
