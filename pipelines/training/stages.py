"""The stages bound to one run: each method finds its output committed, or computes and commits it.

A method takes and returns pointers to committed outputs. What is heavy (policy, engine, sandbox) is opened when a
stage first needs it, so a run whose stages are all committed opens nothing. Imports no prefect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec

from magrpo.config import RunConfig
from magrpo.engines import EngineError
from magrpo.sandboxes import SandboxDied
from magrpo.seeds import derive_seed
from magrpo.store import Pointer, RunStore, digest, read_records, write_records
from magrpo.types import (
    HEADLINE,
    EvalReport,
    Execution,
    ExecutionReport,
    Problem,
    RolloutGroup,
    Sample,
    ScoredTurn,
    Split,
    Turn,
)
from pipelines.training.resources import Resources

if TYPE_CHECKING:
    from magrpo.interfaces import Engine, Progress
    from magrpo.stages.play import Arena
    from magrpo.stages.score import ScoreStats

_POLICY = ("agents", "model", "lora", "train")


class Console(Protocol):
    """Shows a run's progress."""

    def begin(self, stage: str, iteration: int, items: int | None = None) -> Progress:
        """A stage starts; call what is returned with the number of items just finished."""
        ...

    def end(self, stage: str, iteration: int, metrics: Mapping[str, float], *, reused: bool) -> None:
        """A stage is committed."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


class Session:
    """Implements :class:`pipelines.training.loop.Stages` for one run directory. ``tag`` records tags of the run."""

    def __init__(
        self, config: RunConfig, store: RunStore, console: Console, tag: Callable[[Mapping[str, str]], None]
    ) -> None:
        self.config = config
        self.store = store
        self.console = console
        self._tag = tag
        self._open = Resources(config, store, self._isolated)
        self._reports: dict[Execution, ExecutionReport] = {}
        self._problems: dict[Split, list[Problem]] = {}
        self._progress: Progress | None = None  # of the stage under way

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    # ------------------------------------------------------------------------------------------------------- stages
    def prepare(self) -> Pointer:
        """Load and check the problem set."""

        def work(folder: Path) -> dict[str, float]:
            from magrpo.stages.prepare import prepare

            splits = prepare(self.config.problems, self.config.rollout.problems_per_iteration)
            for split, members in splits.items():
                write_records(folder / f"{split}.jsonl.gz", members)
            return {f"problems/{split}": float(len(members)) for split, members in splits.items()}

        return self._stage("prepare", 0, ("problems", "rollout"), [], work)

    def start(self) -> Pointer:
        """Write the untrained weights: checkpoint 0."""

        def work(folder: Path) -> dict[str, float]:
            self._open.updater.save(folder)
            return {"start/gpus": float(self._open.policy.device.type == "cuda")}

        return self._stage("update", 0, (*_POLICY, "optim", "algo"), [], work)

    def rollout(
        self, iteration: int, turn: int, problems: Pointer, checkpoint: Pointer, parents: Pointer | None
    ) -> Pointer:
        """Sample one tree level with the weights of ``checkpoint``."""

        def work(folder: Path) -> dict[str, float]:
            from magrpo.stages.prepare import draw
            from magrpo.stages.rollout import children, rollout, roots

            config, seed = self.config, derive_seed(self.config.train.seed, "rollout", iteration, turn)
            if parents is None:
                train = self._load_problems(problems)["train"]
                drawn = draw(train, iteration, config.rollout.problems_per_iteration, config.train.seed)
                nodes = roots(drawn, config.rollout)
            else:
                nodes = children(self._scored(parents), config.rollout, seed)
            groups: list[RolloutGroup[Turn]] = []
            if nodes:
                groups = rollout(
                    nodes,
                    agents=config.agents,
                    env=config.env,
                    render=self._open.policy.render,
                    engine=self._open.serve(checkpoint),
                    config=config.rollout,
                    seed=seed,
                    progress=self._progress,
                )
            write_records(folder / "groups.jsonl.gz", groups)
            return _rollout_metrics(groups)

        inputs = [problems, checkpoint, *([parents] if parents else [])]
        return self._stage(f"rollout.{turn}", iteration, (*_POLICY, "env", "engine", "rollout"), inputs, work)

    def score(self, iteration: int, turn: int, groups: Pointer) -> Pointer:
        """Run the programs and price every joint action."""

        def work(folder: Path) -> dict[str, float]:
            from magrpo.sandboxes.remarkable import write_remarkable
            from magrpo.stages.score import score

            unscored = read_records(self.store.folder(groups) / "groups.jsonl.gz", RolloutGroup[Turn])
            scored, stats = score(
                unscored,
                roles={agent.name: agent.role for agent in self.config.agents},
                reward=self.config.reward,
                sandbox=self._open.sandbox,
                cache=self._reports,
                progress=self._progress,
            )
            write_records(folder / "groups.jsonl.gz", scored)
            write_remarkable(folder / "remarkable.json", stats.ran)
            return stats.metrics()

        return self._stage(f"score.{turn}", iteration, ("reward", "sandbox"), [groups], work)

    def credit(self, iteration: int, scored: Sequence[Pointer]) -> Pointer:
        """Returns and advantages of every completion."""

        def work(folder: Path) -> dict[str, float]:
            from magrpo.stages.credit import credit

            groups = [group for pointer in scored for group in self._scored(pointer)]
            config = self.config
            samples, metrics = credit(
                groups,
                config.algo,
                [agent.name for agent in config.agents],
                {agent.name: agent.estimator for agent in config.agents if agent.estimator is not None},
                rollout=config.rollout,
                num_turns=config.env.num_turns,
            )
            for agent, members in samples.items():
                write_records(folder / f"{agent}.jsonl.gz", members)
            return metrics

        sections = ("algo", "agents", "env", "rollout")
        return self._stage("credit", iteration, sections, scored, work)

    def update(self, iteration: int, samples: Pointer, checkpoint: Pointer) -> Pointer:
        """One MAGRPO update of every agent that trains; the new weights and the optimizer's state."""
        computed = False

        def work(folder: Path) -> dict[str, float]:
            nonlocal computed
            batch = {
                agent.name: read_records(self.store.folder(samples) / f"{agent.name}.jsonl.gz", Sample)
                for agent in self.config.agents
                if agent.trained
            }
            updater = self._open.train(checkpoint)
            metrics = updater.update(batch, self._progress)
            updater.save(folder)
            computed = True
            return metrics

        pointer = self._stage("update", iteration, (*_POLICY, "optim", "algo"), [samples, checkpoint], work)
        if computed:
            self._open.trained(pointer)
        if (iteration - 1) % self.config.eval.every != 0:
            self.store.prune(checkpoint, "optimizer.pt")
        return pointer

    def evaluate(self, iteration: int, problems: Pointer, checkpoint: Pointer) -> Pointer:
        """The weights of ``checkpoint`` on problems never trained on."""

        def work(folder: Path) -> dict[str, float]:
            from magrpo.stages.evaluate import evaluate

            config = self.config
            arena = self._arena(self._open.serve(checkpoint))
            splits = self._load_problems(problems)
            report, kept = evaluate(arena, config, splits, config.seeded_eval(), config.rollout, iteration)
            _write_evaluation(folder, report, arena.stats)
            write_records(folder / "trajectories.jsonl.gz", kept)
            headline = report.summary[HEADLINE]
            metrics = {f"eval/{key}": interval.mean for key, interval in headline.items()}
            metrics["eval/sandbox/infra_error_frac"] = arena.stats.metrics()["sandbox/infra_error_frac"]
            for name, summary in report.summary.items():
                if name != HEADLINE:
                    metrics[f"eval/{name}/return"] = summary["return"].mean
            return metrics

        sections = ("eval", "env", "reward", "sandbox", "engine", "rollout")
        return self._stage("evaluate", iteration, sections, [problems, checkpoint], work)

    def baseline(self, row: str, problems: Pointer, untrained: Pointer, earlier: Mapping[str, Pointer]) -> Pointer:
        """One row of the table of baselines; ``untrained`` are the weights of agents that start from nothing.

        ``earlier``: the rows made so far, for one that votes at the tokens of the costliest of them.
        """

        def work(folder: Path) -> dict[str, float]:
            from magrpo.stages.baseline import baseline, num_votes

            config = self.config
            chosen = next(one for one in config.baselines.rows if one.name == row)
            votes = 1
            if chosen.votes != "none":
                votes = num_votes({name: load_report(self.store, made) for name, made in earlier.items()}, "single")
            arena = self._arena(self._open.seat(chosen, untrained))
            report, timed = baseline(
                arena,
                chosen,
                self._load_problems(problems),
                config.seeded_eval(),
                config.rollout,
                num_votes=votes,
                timed_problems=config.baselines.timed_problems,
            )
            _write_evaluation(folder, report, arena.stats)
            write_records(folder / "timed.jsonl.gz", timed)
            metrics = {key: interval.mean for key, interval in report.summary[HEADLINE].items()}
            metrics["sandbox/infra_error_frac"] = arena.stats.metrics()["sandbox/infra_error_frac"]
            metrics["votes"] = float(votes)
            return {f"baseline/{row}/{key}": value for key, value in metrics.items()}

        sections = ("baselines", "eval", "sandbox", "engine", "model", "lora", "rollout")
        inputs = [problems, untrained, *earlier.values()]
        return self._stage(f"baseline.{row}", 0, sections, inputs, work)

    def report(self, evaluations: Sequence[Pointer]) -> Pointer:
        """The closing table and pictures; of a run of baselines their tables."""

        def work(folder: Path) -> dict[str, float]:
            if self.config.baselines.rows:
                from magrpo.reports.baselines import BaselineTable, read_baselines

                BaselineTable(self.config, read_baselines(self.store, self.config)).write_files(folder)
                return {}
            from magrpo.reports.budget import build_ledger
            from magrpo.reports.run import RunReport

            reports = [load_report(self.store, pointer) for pointer in evaluations]
            budgets = build_ledger(self.store.stage_metrics())
            RunReport(self.config, reports, budgets, self._held_out()).write_files(folder, self.store.run_id)
            before, after = (report.summary[HEADLINE]["return"].mean for report in (reports[0], reports[-1]))
            return {"report/return_gain": after - before}

        sections = ("baselines",) if self.config.baselines.rows else ("reward", "agents")
        return self._stage("report", self.config.train.num_iterations, sections, evaluations, work)

    # ------------------------------------------------------------------------------------------------------ plumbing
    def _isolated(self, level: str) -> None:
        self.console.say(f"programs run at isolation level {level}")
        self._tag({"sandbox.level": level})

    def _stage(
        self,
        stage: str,
        iteration: int,
        sections: Sequence[str],
        inputs: Sequence[Pointer],
        work: Callable[[Path], Mapping[str, float]],
    ) -> Pointer:
        """The committed output of a stage, computed if need be.

        Its key covers what its result depends on: the named sections of the configuration and its inputs. The length
        of the run is left out unless a learning-rate schedule ends with it.
        """
        config = json.loads(self.config.model_dump_json(include=set(sections)))
        if "train" in config and self.config.optim.schedule == "constant":
            del config["train"]["num_iterations"]
        key = digest(stage, iteration, config, [pointer["sha"] for pointer in inputs])
        name = f"{iteration:05d}/{stage}"
        pointer = self.store.find(name, key)
        if pointer is not None:
            self.console.end(stage, iteration, self.store.metrics(pointer), reused=True)
            return pointer
        self._progress = self.console.begin(stage, iteration)

        def timed(folder: Path) -> Mapping[str, float]:
            started = perf_counter()
            metrics = work(folder)
            return {**metrics, f"time/{stage.split('.')[0]}_s": perf_counter() - started}

        try:
            pointer = self.store.commit(name, key, timed)
        except (EngineError, SandboxDied):
            self._open.let_go()
            raise
        self.console.end(stage, iteration, self.store.metrics(pointer), reused=False)
        return pointer

    def _arena(self, engine: Engine) -> Arena:
        from magrpo.stages.play import Arena

        return Arena(
            engine=engine,
            sandbox=self._open.sandbox,
            render=self._open.policy.render,
            cache=self._reports,
            progress=self._progress,
        )

    def _load_problems(self, problems: Pointer) -> dict[Split, list[Problem]]:
        if not self._problems:
            for path in self.store.folder(problems).glob("*.jsonl.gz"):
                self._problems[path.name.removesuffix(".jsonl.gz")] = read_records(path, Problem)  # type: ignore[index]
        return self._problems

    def _held_out(self) -> dict[str, Problem]:
        """The problems never trained on, by id."""
        prepared = self.store.find("00000/prepare")
        assert prepared is not None, "a run that was evaluated has its problems"
        splits = self._load_problems(prepared)
        return {
            problem.task_id: problem for split, members in splits.items() if split != "train" for problem in members
        }

    def _scored(self, pointer: Pointer) -> list[RolloutGroup[ScoredTurn]]:
        return read_records(self.store.folder(pointer) / "groups.jsonl.gz", RolloutGroup[ScoredTurn])


def _write_evaluation(folder: Path, report: EvalReport, stats: ScoreStats) -> None:
    from magrpo.sandboxes.remarkable import write_remarkable

    write_remarkable(folder / "remarkable.json", stats.ran)
    (folder / "report.json").write_bytes(msgspec.json.encode(report))


def load_report(store: RunStore, pointer: Pointer) -> EvalReport:
    """Read back a committed evaluation."""
    return msgspec.json.decode((store.folder(pointer) / "report.json").read_bytes(), type=EvalReport)


def _rollout_metrics(groups: Sequence[RolloutGroup[Turn]]) -> dict[str, float]:
    actions = [action for group in groups for members in group.actions.values() for action in members]
    tokens = sum(len(action.token_ids) for action in actions)
    return {
        "rollout/groups": float(len(groups)),
        "rollout/joint_actions": float(sum(len(group.turns) for group in groups)),
        "rollout/tokens": float(tokens),
        "rollout/response_tokens": tokens / len(actions) if actions else 0.0,
        "rollout/cut_off_frac": sum(a.finish_reason == "length" for a in actions) / len(actions) if actions else 0.0,
    }
