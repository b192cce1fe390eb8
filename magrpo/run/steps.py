"""The stages of a run in one table, and the steps of a run: its stages in every turn and iteration, in order.

To add a stage, add its :class:`StageSpec` to a table below and write its ``writer``. The names of its folders, its key,
its line on the console and its place in reports follow from the table.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from magrpo.config.run import RunConfig
from magrpo.run.store import RunStore

CHECKPOINT = "checkpoint"
"""An input of a stage that reads weights: the output of any stage that writes checkpoints."""
When = Literal["first", "turn", "iteration", "evaluation", "row", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage: everything that other modules need to know about it."""

    name: str
    when: When
    """When it is computed: once at the beginning or the end, at every turn, once an iteration, whenever a checkpoint is
    evaluated, or for every row of a table of baselines."""
    inputs: tuple[str, ...] = ()
    """Stages whose outputs it takes, or :data:`CHECKPOINT`.

    An input that is computed at every turn comes from the same turn if it stands earlier in the table, else from the
    turn before; a stage of the whole iteration takes the outputs of all turns.
    """
    writer: str
    """``module:function``, a :data:`magrpo.stages.context.Writer`, which computes a step and writes its files."""
    sections: tuple[str, ...]
    """Sections of the configuration that its output depends on, besides its inputs; they enter its key."""
    extra_sections: Callable[[RunConfig], tuple[str, ...]] = lambda _: ()
    """Further sections that its output depends on in a run of this configuration."""
    takes_previous: bool = False
    """Whether it takes its own output of the iteration before, which its last input names."""
    is_needed: Callable[[RunConfig], bool] = lambda _: True
    """Whether a run of this configuration computes it."""
    shows_prompts: bool = False
    """Whether it prompts agents; the text of the prompts then enters its key, too."""
    writes_checkpoint: bool = False
    activity: str
    """Present participle that names its work on the console: ``sampling``."""
    items: str = ""
    """Plural of the items that it counts while it works: ``completions``."""
    folder: str = ""
    """Name of its folder, where this is not the stage's name."""


def _list_sections_of_probes(config: RunConfig) -> tuple[str, ...]:
    """The rewards of probes decide which problems a rollout samples."""
    return ("reward", "penalty", "sandbox") if config.rollout.probe_size is not None else ()


_POLICY = ("agents", "model", "lora", "train")
_FIRST = (
    StageSpec(
        name="prepare",
        when="first",
        writer="magrpo.stages.prepare:write_problems",
        sections=("problems", "rollout"),
        activity="preparing",
    ),
    StageSpec(
        name="start",
        when="first",
        writer="magrpo.stages.checkpoints:write_untrained",
        sections=(*_POLICY, "optim", "algo"),
        writes_checkpoint=True,
        activity="starting",
        folder="update",
    ),
)
_TRAINING = (
    *_FIRST,
    StageSpec(
        name="rollout",
        when="turn",
        inputs=("prepare", CHECKPOINT, "score"),
        writer="magrpo.stages.rollout:write_groups",
        sections=(*_POLICY, "env", "engine", "rollout"),
        extra_sections=_list_sections_of_probes,
        shows_prompts=True,
        activity="sampling",
        items="completions",
    ),
    StageSpec(
        name="score",
        when="turn",
        inputs=("rollout",),
        writer="magrpo.stages.score:write_scored_groups",
        sections=("reward", "penalty", "sandbox"),
        activity="scoring",
        items="programs",
    ),
    StageSpec(
        name="critic",
        when="iteration",
        inputs=("score", "critic"),
        writer="magrpo.stages.critic:write_values",
        sections=("critic", "algo", "agents", "model", "env", "rollout"),
        takes_previous=True,
        is_needed=lambda config: config.trains_critics,
        activity="valuing",
        items="observations",
    ),
    StageSpec(
        name="credit",
        when="iteration",
        inputs=("score", "critic"),
        writer="magrpo.stages.credit:write_samples",
        sections=("algo", "agents", "env", "rollout"),
        activity="credit",
    ),
    StageSpec(
        name="update",
        when="iteration",
        inputs=("credit", CHECKPOINT),
        writer="magrpo.stages.checkpoints:write_updated",
        sections=(*_POLICY, "optim", "algo"),
        writes_checkpoint=True,
        activity="updating",
        items="completions",
    ),
    StageSpec(
        name="evaluate",
        when="evaluation",
        inputs=("prepare", CHECKPOINT),
        writer="magrpo.stages.evaluate:write_evaluation",
        sections=("eval", "env", "reward", "penalty", "sandbox", "engine", "rollout"),
        shows_prompts=True,
        activity="evaluating",
        items="completions",
    ),
    StageSpec(
        name="report",
        when="last",
        inputs=("evaluate",),
        writer="magrpo.reports.run:write_report",
        sections=("reward", "agents"),
        activity="reporting",
    ),
)
"""The stages of a training run, in order."""
_BASELINES = (
    *_FIRST,
    StageSpec(
        name="baseline",
        when="row",
        inputs=("prepare", CHECKPOINT),
        writer="magrpo.stages.baseline:write_row",
        sections=("baselines", "eval", "sandbox", "engine", "model", "lora", "rollout"),
        shows_prompts=True,
        activity="evaluating",
        items="completions",
    ),
    StageSpec(
        name="tables",
        when="last",
        inputs=("baseline",),
        writer="magrpo.reports.baselines:write_tables",
        sections=("baselines",),
        activity="reporting",
        folder="report",
    ),
)
"""The stages of a run that compares baselines instead of training, in order."""

STAGES: Mapping[str, StageSpec] = {spec.name: spec for spec in (*_TRAINING, *_BASELINES)}
TRAINING_STAGES = tuple(spec.name for spec in _TRAINING if spec.when in ("turn", "iteration"))
"""The stages of a training iteration, in order; a run may not need all of them."""
SAMPLING_STAGES = tuple(name for name in TRAINING_STAGES if not STAGES[name].writes_checkpoint)
"""The stages of an iteration that make its samples; with ``train.lag`` they run beside earlier updates."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one iteration."""

    stage: str
    iteration: int
    part: str = ""
    """Turn of a stage that is computed at every turn; row of a baseline."""
    inputs: tuple[str, ...] = ()
    """Outputs of other steps that it takes, by name."""

    @property
    def spec(self) -> StageSpec:
        """The entry of its stage in the tables."""
        return STAGES[self.stage]

    @property
    def output(self) -> str:
        """Name of its output in the store: ``00007/rollout.0``."""
        return f"{self.iteration:05d}/{self._add_part(self.spec.folder or self.stage)}"

    @property
    def label(self) -> str:
        """Its name for users, without the iteration: ``rollout.0``, ``start``."""
        return self._add_part(self.stage)

    @property
    def happens_once(self) -> bool:
        """Whether the stage is computed once a run and belongs to no iteration."""
        return self.spec.when in ("first", "last")

    @property
    def writes_checkpoint(self) -> bool:
        """Whether its output is a checkpoint: weights and the state of optimizers."""
        return self.spec.writes_checkpoint

    @property
    def belongs_to_turn(self) -> bool:
        """Whether it is skipped once all episodes of its iteration have ended."""
        return self.spec.when == "turn"

    def _add_part(self, name: str) -> str:
        return f"{name}.{self.part}" if self.part else name

    def __str__(self) -> str:
        return self.label if self.happens_once else f"{self.label}:{self.iteration}"


# --------------------------------------------------------------------------------------------------------------- steps
def steps(config: RunConfig) -> list[Step]:
    """List the steps of a run in order; the loop skips later turns of an iteration whose episodes have all ended."""
    return list(_baseline_steps(config) if makes_tables(config) else _training_steps(config))


def makes_tables(config: RunConfig) -> bool:
    """Whether the run compares baselines instead of training."""
    return bool(config.baselines.rows)


def evaluates_after(config: RunConfig, iteration: int) -> bool:
    """Whether the checkpoint of ``iteration`` is evaluated."""
    return iteration % config.eval.every == 0 or iteration == config.train.num_iterations


def _training_steps(config: RunConfig) -> Iterator[Step]:
    plan = _Plan(config.train.lag)
    table = [spec for spec in _TRAINING if spec.is_needed(config)]
    yield from plan.add_steps(table, "first", 0)
    for iteration in range(config.train.num_iterations + 1):
        if iteration > 0:
            plan.forget(TRAINING_STAGES)
            for turn in range(config.env.num_turns):
                yield from plan.add_steps(table, "turn", iteration, str(turn))
            yield from plan.add_steps(table, "iteration", iteration)
        if evaluates_after(config, iteration):
            yield from plan.add_steps(table, "evaluation", iteration)
    yield from plan.add_steps(table, "last", config.train.num_iterations)


def _baseline_steps(config: RunConfig) -> Iterator[Step]:
    """Yield a step for each row; a row that votes takes earlier rows without a vote as inputs, to match their cost."""
    plan = _Plan()
    yield from plan.add_steps(_BASELINES, "first", 0)
    without_votes: list[str] = []
    for row in config.baselines.rows:
        for step in plan.add_steps(_BASELINES, "row", 0, row.name):
            if row.votes == "none":
                without_votes.append(step.output)
                yield step
            else:
                yield replace(step, inputs=(*step.inputs, *without_votes))
    yield from plan.add_steps(_BASELINES, "last", config.train.num_iterations)


class _Plan:
    """The steps listed so far, in which a new step finds its inputs. Updates are ``lag`` ahead of sampled weights."""

    def __init__(self, lag: int = 0) -> None:
        self._lag = lag
        self._made: dict[str, list[Step]] = defaultdict(list)
        """The steps by stage; under :data:`CHECKPOINT`, all steps that write checkpoints."""

    def add_steps(self, table: Sequence[StageSpec], when: When, iteration: int, part: str = "") -> Iterator[Step]:
        """Yield the steps of the stages of ``table`` that are computed at this point."""
        for spec in table:
            if spec.when == when:
                inputs = tuple(step.output for name in spec.inputs for step in self._find_inputs(name, spec, part))
                step = Step(spec.name, iteration, part, inputs)
                self._made[spec.name].append(step)
                if spec.writes_checkpoint:
                    self._made[CHECKPOINT].append(step)
                yield step

    def forget(self, stages: Sequence[str]) -> None:
        """Forget the steps of these stages that a new iteration does not take as inputs."""
        for stage in stages:
            if not STAGES[stage].takes_previous:
                self._made[stage].clear()

    def _find_inputs(self, name: str, reader: StageSpec, part: str) -> Sequence[Step]:
        made = self._made[name]
        if name == CHECKPOINT:
            lag = self._lag if reader.name in SAMPLING_STAGES else 0
            return [made[max(len(made) - 1 - lag, 0)]]
        if STAGES[name].takes_previous:
            return made[-1:]
        if STAGES[name].when == reader.when == "turn":
            is_earlier = TRAINING_STAGES.index(name) < TRAINING_STAGES.index(reader.name)
            turn = int(part) if is_earlier else int(part) - 1
            return [step for step in made if step.part == str(turn)]
        return made


def first_missing(config: RunConfig, store: RunStore) -> int:
    """Return the position in :func:`steps` of the first step left to compute; with a lag, later ones may be done."""
    every = steps(config)
    return next((i for i, step in enumerate(every) if not is_past(step, store)), len(every))


def is_past(step: Step, store: RunStore) -> bool:
    """Whether ``step`` is committed, or was skipped because the iteration's episodes had all ended."""
    if store.is_committed(step.output):
        return True
    return step.belongs_to_turn and store.is_committed(Step("credit", step.iteration).output)
