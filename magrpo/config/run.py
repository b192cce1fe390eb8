"""The configuration of a run: one frozen tree, TOML in, resolved JSON out.

Imports no heavy library: a plug-in's class is imported only when a configuration names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from magrpo.algo.advantages import ESTIMATORS, EstimatorName
from magrpo.checks.envs import count_turns, list_acting, list_roles
from magrpo.checks.rewards import check_maxima, check_priced_roles
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, weight_holders
from magrpo.config.sections import (
    AlgoConfig,
    CriticConfig,
    EvalConfig,
    OptimConfig,
    PenaltyConfig,
    RolloutConfig,
    TrainConfig,
)
from magrpo.config.services import NotifyConfig, RegistryConfig, TrackingConfig
from magrpo.config.validate import read_toml, validate_config
from magrpo.envs.program import AgentProgram
from magrpo.errors import check_name, quote_value
from magrpo.files.paths import expand_home
from magrpo.interfaces import HasMaxExecutions, TakesReturned
from magrpo.plugins import Section, plugin_field
from magrpo.seeds import derive_seed
from magrpo.types import PENALTY

if TYPE_CHECKING:
    from magrpo.interfaces import EnginePlugin, EnvPlugin, ProblemsPlugin, RewardPlugin, SandboxPlugin
else:
    ProblemsPlugin, EnvPlugin = plugin_field("problems"), plugin_field("env")
    RewardPlugin = Annotated[plugin_field("reward"), AfterValidator(check_maxima)]
    SandboxPlugin, EnginePlugin = plugin_field("sandbox"), plugin_field("engine")

MAX_TURNS = 1000
"""Maximum number of turns of an episode; more do not fit into any context window."""
MAX_NODES = 10_000_000
"""Maximum number of completions, and of joint actions, of an iteration; they are held in memory."""
REFERENCE = "naive"
"""Name of the baseline row that all other rows are compared with."""


class BaselineRow(Section):
    """One row of a table of baselines: one way to answer, compared with the others."""

    name: Annotated[str, AfterValidator(partial(check_name, signs="-_.", longest=220))]
    """Name of the row in files and metrics; that of cross-play holds two names of runs."""
    title: str
    """Title of the row in tables."""
    env: EnvPlugin
    """The environment: roles, prompts, turns and feedback."""
    reward: RewardPlugin
    """The reward of the answers."""
    penalty: PenaltyConfig = PenaltyConfig()
    """Costs of faulty answers."""
    agents: tuple[AgentConfig, ...] = Field(min_length=1)
    """Agents of the run, by name, with their role and weights in this row. Without ``start_from``, they are
    untrained."""
    max_new_tokens: int = Field(ge=1)
    """Maximum length of a completion, in tokens."""
    shuffled: bool = False
    """Whether each agent sees, in place of its partners' texts, those of the same agents on another problem."""
    votes: Literal["none", "majority", "best"] = "none"
    """Choose one of several answers: the ``majority`` by behaviour on the tests' inputs, or the ``best`` by reward."""
    stop_above: float | None = None
    """End a trajectory as soon as its reward exceeds this value, in reward units (an oracle). None: take every turn."""
    max_tries: int = Field(1, ge=1)
    """Maximum number of tries without feedback until a reward exceeds ``stop_above``. The last try counts, with the
    tokens of all tries."""

    @property
    def is_trained_team(self) -> bool:
        """Whether it is the agents that the run trained, as they are."""
        return self.name == "magrpo"

    @property
    def is_mixed_team(self) -> bool:
        """Whether it is a team with agents of several runs."""
        return self.name.startswith("partners_")


class BaselinesConfig(Section):
    """The table of ``magrpo evaluate --baselines``, which writes this section. A run with rows does not train."""

    rows: tuple[BaselineRow, ...] = ()
    """Rows of the table, in order."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Rows that cannot be computed, by name, with the reason. The program writes this field; do not set it."""


def count_levels(rollout: RolloutConfig, num_acting: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Completions and joint actions of one problem's tree at each turn, if no episode ends early.

    ``num_acting``: number of agents that act at each turn.
    """
    nodes = 1
    for turn, agents in enumerate(num_acting):
        group_size = 1 if turn and rollout.tree == "chains" else rollout.group_size
        joint = group_size
        if rollout.joint_mode == "crossed":
            joint = min(group_size**agents, rollout.crossed_pairs or group_size**agents)
        yield nodes * group_size * agents, nodes * joint
        nodes *= joint


class RunConfig(Section):
    """A whole training run."""

    agents: tuple[AgentConfig, ...] = Field(min_length=1)
    problems: ProblemsPlugin
    """The problem set."""
    env: EnvPlugin
    """The environment: roles, prompts, turns and feedback."""
    reward: RewardPlugin
    """The reward of joint actions."""
    sandbox: SandboxPlugin
    """The sandbox that runs the agents' programs."""
    engine: EnginePlugin
    """The engine that generates completions."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    penalty: PenaltyConfig = PenaltyConfig()
    algo: AlgoConfig = AlgoConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig = CriticConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    baselines: BaselinesConfig = BaselinesConfig()
    tracking: TrackingConfig = TrackingConfig()
    registry: RegistryConfig = RegistryConfig()
    notify: NotifyConfig = NotifyConfig()
    root: Annotated[Path, AfterValidator(expand_home)] = Path("runs")
    """Folder that holds the run directories."""

    @model_validator(mode="after")
    def _can_be_computed(self) -> RunConfig:
        turns = count_turns(self.env)
        if turns > MAX_TURNS:
            raise ValueError(f"env.num_turns = {turns:,}: an episode has at most {MAX_TURNS:,} turns")
        completions = joint_actions = 0
        for turn, level in enumerate(count_levels(self.rollout, self.count_acting())):
            completions += level[0] * self.rollout.problems_per_iteration
            joint_actions += level[1] * self.rollout.problems_per_iteration
            if max(completions, joint_actions) > MAX_NODES:
                raise ValueError(
                    f"rollout: up to turn {turn + 1} an iteration has {completions:,} completions and "
                    f"{joint_actions:,} joint actions; at most {MAX_NODES:,} of each are supported: lower "
                    "rollout.group_size, problems_per_iteration or env.num_turns, or limit crossed_pairs"
                )
        return self

    @model_validator(mode="after")
    def _agents_fill_roles(self) -> RunConfig:
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError(f"agents: names must differ, got {', '.join(names)}")
        if not any(agent.trained for agent in self.agents):
            raise ValueError("agents: none is trained; set trained = true for at least one")
        by_name = {agent.name: agent for agent in self.agents}
        for name, holder in weight_holders(self.agents).items():
            one, other = by_name[name], by_name[holder]
            if (one.lr, one.trained) != (other.lr, other.trained):
                raise ValueError(f"agents: {holder!r} and {name!r} share weights; give both the same lr and trained")
            if (one.start_from is None) != (other.start_from is None):
                raise ValueError(f"agents: {holder!r} and {name!r} share weights; give both a start_from, or neither")
        if isinstance(self.env, AgentProgram):
            self._check_program(self.env)
            return self
        wanted = sorted(list_roles(self.env))
        _check_roles(f"agents: env {self.env.kind!r}", wanted, self.agents)
        acting = {role for turn in range(self.env.num_turns) for role in list_acting(self.env, turn)}
        if sorted(acting) != wanted:
            raise ValueError(
                f"env: {self.env.kind!r} has the roles {wanted}, but the roles that act in its {self.env.num_turns} "
                f"turns are {sorted(acting)}; see acting() and num_turns"
            )
        if isinstance(self.reward, TakesReturned):
            raise ValueError(
                f"reward: kind {self.reward.kind!r} is for programs, which return their own rewards: choose another, "
                'or env.kind = "program"'
            )
        check_priced_roles(self.reward, self.env, list_roles(self.env))
        return self

    @model_validator(mode="after")
    def _programs_can_run(self) -> RunConfig:
        runs_programs = isinstance(self.reward, HasMaxExecutions) and self.reward.max_executions > 0
        if runs_programs and self.sandbox.kind == "none":
            raise ValueError(
                f'sandbox: kind "none" runs no programs, but the reward {self.reward.kind!r} needs them run: set '
                'sandbox.kind = "pool"'
            )
        return self

    def _check_program(self, env: AgentProgram) -> None:
        roles = [agent.role for agent in self.agents]
        if len(set(roles)) != len(roles):
            raise ValueError(f"agents: roles must differ, got {', '.join(roles)}")
        if unknown := sorted(set(env.models.values()) - set(roles)):
            raise ValueError(f"env.models: {', '.join(unknown)} is the role of no agent; there are: {', '.join(roles)}")
        if self.rollout.joint_mode != "aligned" or self.rollout.tree != "chains":
            raise ValueError(
                "rollout: the answers in an episode of a program depend on each other, so they cannot be combined with "
                'those of other episodes: set joint_mode = "aligned" and tree = "chains"'
            )
        if isinstance(self.reward, TakesReturned) == bool(env.writes):
            raise ValueError(
                "env.writes: name the roles whose texts the reward prices and the program returns; leave it out if the "
                'program returns its own reward (reward.kind = "returned")'
            )
        check_priced_roles(self.reward, env, env.writes)
        if not self.reward.fraction(env.failure_reward) <= 1:
            raise ValueError(f"env.failure_reward = {env.failure_reward:g} is above the maximum of the reward")

    @model_validator(mode="after")
    def _preferences_fit(self) -> RunConfig:
        if self.algo.loss != "madpo":
            return self
        faults = []
        if self.rollout.group_size == 1:
            faults.append(
                "rollout.group_size = 1 leaves a node one joint action and nothing to prefer: set it to 2 or more"
            )
        if self.trains_critics:
            faults.append("algo.estimator: preferences need no critic: set the estimator of every agent to one without")
        if isinstance(self.env, AgentProgram):
            faults.append(
                "env: preferences compare joint actions of one node, and a program has no nodes: use policy_gradient"
            )
        if self.env.num_turns > 1 and self.rollout.tree != "full":
            faults.append('rollout.tree: with several turns, pairs at every turn need tree = "full"')
        if self.algo.normalize == "std":
            faults.append('algo.normalize = "std" is for advantages: set it to "none"')
        if self.algo.beta > 0:
            faults.append("algo.beta adds a second penalty: set it to 0, and use algo.preference_beta")
        if self.train.lag:
            faults.append("train.lag: margins are taken to the weights that sampled, so set it to 0")
        if self.algo.importance_cap is not None:
            faults.append("algo.importance_cap would weigh tokens, not preferences: remove it")
        if self.algo.ratio == "sequence":
            faults.append('algo.ratio = "sequence": preferences take no ratio, so remove it')
        if self.algo.loss_norm == "sequence_mean":
            faults.append('algo.loss_norm = "sequence_mean": margins add up tokens, so take "sequence_sum"')
        _refuse('algo.loss = "madpo"', faults)
        return self

    @model_validator(mode="after")
    def _probes_fit(self) -> RunConfig:
        if self.rollout.probe_size is None:
            return self
        faults = []
        if isinstance(self.env, AgentProgram):
            faults.append("env: the episodes of a program cannot be probed")
        if self.env.num_turns > 1:
            faults.append("env.num_turns must be 1, because rewards of the first turn do not decide about later ones")
        if self.train.lag:
            faults.append("train.lag must be 0")
        if self.rollout.crossed_pairs is not None and self.rollout.probe_size < self.rollout.group_size:
            faults.append("rollout.crossed_pairs draws other pairs for a probe than for its group: probe whole groups")
        if self.algo.loss != "policy_gradient":
            faults.append('algo.loss must be "policy_gradient"')
        if not self.all_have_baselines:
            faults.append("algo.estimator must have siblings as baseline, because others learn from equal rewards, too")
        _refuse("rollout.probe_size", faults, "; or remove probe_size")
        return self

    @model_validator(mode="after")
    def _lenience_fits(self) -> RunConfig:
        if not self.algo.lenience:
            return self
        acting = self.count_acting()
        levels = zip(count_levels(self.rollout, acting), acting, strict=True)
        most = max(joint_actions * agents // completions for (completions, joint_actions), agents in levels)
        remedy = f"set it to 1/{most} or more"
        if most == 1:
            remedy = 'set rollout.joint_mode = "crossed" without crossed_pairs, for more of agents that act at once'
        faults = []
        if self.algo.lenience * most < 1:
            faults.append(f"of {most} joint actions with a completion it leaves out none: {remedy}")
        if self.algo.loss != "policy_gradient":
            faults.append('algo.loss must be "policy_gradient"')
        if not self.all_have_baselines:
            faults.append("algo.estimator must have siblings as baseline: the best returns are all above the mean")
        _refuse("algo.lenience", faults, "; or set lenience to 0")
        return self

    @model_validator(mode="after")
    def _groups_can_train(self) -> RunConfig:
        for agent in self.agents:
            estimator = self.estimator_of(agent)
            can_train = ESTIMATORS[estimator].can_train(self.rollout.group_size, self.algo.normalize)
            if agent.trained and not can_train:
                raise ValueError(
                    f"rollout: a group of 1 has no siblings, so agent {agent.name!r} with estimator {estimator!r} "
                    'would never train; set group_size to 2 or more, or algo.estimator to "iac" or "mareinforce" with '
                    'algo.normalize = "none"'
                )
        if self.algo.gamma == 0 and self.count_acting()[0] < len(self.agents):
            raise ValueError(
                "algo.gamma = 0 trains the first turn only and ignores the rewards after it, but not every agent acts "
                "at the first turn: set it above 0"
            )
        return self

    @model_validator(mode="after")
    def _critics_fit(self) -> RunConfig:
        if not self.trains_critics:
            return self
        if isinstance(self.env, AgentProgram):
            raise ValueError(
                "algo.estimator: critics value the prompts of turns, but a program decides itself which prompts follow "
                'each other; set the estimator of every agent to one without a critic, such as "magrpo" or "marloo"'
            )
        if self.train.lag:
            raise ValueError(
                f"train.lag = {self.train.lag} samples several iterations at once, but a critic learns from one after "
                'another; set train.lag = 0, or the estimator of every agent to one without a critic, such as "magrpo"'
            )
        return self

    @model_validator(mode="after")
    def _names_one_penalty(self) -> RunConfig:
        if self.penalty.is_on and PENALTY in self.reward.maxima:
            raise ValueError(
                f"penalty: the reward {self.reward.kind!r} has a part {PENALTY!r} of its own; rename that part, or set "
                "the keys of penalty to 0"
            )
        return self

    @model_validator(mode="after")
    def _corrects_for_lag(self) -> RunConfig:
        if self.train.lag and self.algo.importance_cap is None:
            raise ValueError(
                f"train.lag = {self.train.lag} trains on samples drawn from older weights; correct for that with "
                "algo.importance_cap = 2, or set train.lag to 0"
            )
        return self

    @model_validator(mode="after")
    def _can_end_at_tokens(self) -> RunConfig:
        if self.train.max_tokens is not None:
            end = "train.max_tokens decides which iteration is the last"
            if self.optim.schedule != "constant":
                raise ValueError(f'{end}, so the learning rate cannot decay towards it: set optim.schedule="constant"')
            if self.train.lag:
                raise ValueError(f"{end}, so no later one may be sampled before: set train.lag=0")
        return self

    @property
    def all_have_baselines(self) -> bool:
        """Whether the estimator of every trained agent compares completions with their siblings."""
        return all(ESTIMATORS[self.estimator_of(agent)].has_baseline for agent in self.agents if agent.trained)

    def count_acting(self) -> list[int]:
        """The number of agents that act at each turn; all of them in the only turn of a program."""
        if isinstance(self.env, AgentProgram):
            return [len(self.agents)]
        return [len(list_acting(self.env, turn)) for turn in range(self.env.num_turns)]

    def estimator_of(self, agent: AgentConfig) -> EstimatorName:
        """The agent's estimator: its own, or that of ``algo``."""
        return agent.estimator or self.algo.estimator

    @property
    def method(self) -> str:
        """The name of the training method, such as ``MAGRPO``, or ``IAC + MAGRPO`` if agents differ.

        Of a single agent it is the method's name without the prefix for multi-agent: ``GRPO`` for ``magrpo``.
        """
        if self.algo.loss == "madpo":
            return "MADPO"
        trained = [agent for agent in self.agents if agent.trained] or self.agents
        name = " + ".join(sorted({self.estimator_of(agent) for agent in trained})).upper()
        return name.removeprefix("MA") if len(self.agents) == 1 else name

    @property
    def trains_critics(self) -> bool:
        """Whether the estimator of a trained agent has a critic."""
        return any(agent.trained and ESTIMATORS[self.estimator_of(agent)].critic != "none" for agent in self.agents)

    @property
    def own_estimators(self) -> dict[str, EstimatorName]:
        """The estimator of each agent whose completions are not credited by ``algo.estimator``.

        There are no critics for untrained agents. An estimator without one credits their completions, for the metrics.
        """
        own: dict[str, EstimatorName] = {}
        for agent in self.agents:
            estimator = self.estimator_of(agent)
            if not agent.trained and ESTIMATORS[estimator].critic != "none":
                own[agent.name] = "magrpo"
            elif agent.estimator is not None:
                own[agent.name] = agent.estimator
        return own

    def seeded_eval(self) -> EvalConfig:
        """``eval`` with a seed that also follows from ``train.seed``, so that runs do not share the luck of samples."""
        return self.eval.model_copy(update={"seed": derive_seed("evaluate", self.eval.seed, self.train.seed)})

    def resolved(self, *, secrets: bool = False) -> str:
        """The whole tree as JSON, defaults included; :meth:`RunStore.config` reads it back, with its ``secrets``."""
        return self.model_dump_json(indent=2, context={"secrets": secrets})


def _refuse(option: str, faults: Sequence[str], remedy: str = "") -> None:
    """Raise ValueError, naming all faults, if there are any. Each says what must change, and why."""
    if faults:
        raise ValueError(f"{option}: {'; '.join(faults)}{remedy}")


def _check_roles(subject: str, wanted: Sequence[str], agents: Sequence[AgentConfig]) -> None:
    """Raise ValueError unless ``agents`` have the roles ``wanted``, which are sorted."""
    given = sorted(agent.role for agent in agents)
    if wanted != given:
        raise ValueError(f"{subject} needs one agent for each role {wanted}, got {quote_value(given)}")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply ``section.key=value`` overrides, such as ``agents.0.model=...``.

    ``value`` is TOML (``3``, ``true``, ``[1, 2]``, ``"text"``); anything else is taken as text.

    Raises:
        ConfigError: the file, a key or a value is unusable; the message names it and the remedy.
    """
    return validate_config(RunConfig, read_toml(Path(path)), overrides, str(path))
