"""The configuration of a run: one frozen tree, TOML in, resolved JSON out.

Imports no heavy library: a plug-in's class is imported only when a configuration names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from magrpo.algo.advantages import ESTIMATORS, EstimatorName
from magrpo.checks.envs import count_priced_turns, count_turns, list_acting, list_roles
from magrpo.checks.rewards import check_maxima, check_priced_roles
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, start_weights, weight_holders
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
from magrpo.interfaces import TakesReturned
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
MAX_STEPS = 1_000_000
"""Maximum number of steps of a run; every command lists them in memory."""
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

    @model_validator(mode="after")
    def _tries_end(self) -> BaselineRow:
        if self.max_tries > 1 and (self.stop_above is None or self.votes != "none"):
            raise ValueError("max_tries needs stop_above, the reward of a try that is good enough, and votes = 'none'")
        return self


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
        nodes *= min(joint, rollout.branching or joint)


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
        num_steps = self.train.num_iterations * (2 * turns + 2)
        if num_steps > MAX_STEPS:
            raise ValueError(
                f"train.num_iterations = {self.train.num_iterations:,} with env.num_turns = {turns:,} makes "
                f"{num_steps:,} steps; a run has at most {MAX_STEPS:,}"
            )
        completions = joint_actions = 0
        for turn, level in enumerate(count_levels(self.rollout, self.count_acting())):
            completions += level[0] * self.rollout.problems_per_iteration
            joint_actions += level[1] * self.rollout.problems_per_iteration
            if max(completions, joint_actions) > MAX_NODES:
                raise ValueError(
                    f"rollout: up to turn {turn + 1} an iteration has {completions:,} completions and "
                    f"{joint_actions:,} joint actions; at most {MAX_NODES:,} of each are supported: lower "
                    "rollout.group_size, problems_per_iteration or env.num_turns, or limit branching or crossed_pairs"
                )
        if self.eval.num_samples * turns > MAX_NODES:
            raise ValueError(
                f"eval.num_samples = {self.eval.num_samples:,}: at most {MAX_NODES // turns:,} are supported"
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
        check_priced_roles(self.reward, self.env, list_roles(self.env))
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
        many_turns = self.env.num_turns > 1
        misfits = {
            "rollout.group_size = 1 leaves a node one joint action and nothing to prefer: set it to 2 or more": (
                self.rollout.group_size == 1
            ),
            "algo.estimator: preferences need no critic: set the estimator of every agent to one without": (
                self.trains_critics
            ),
            "env: preferences compare joint actions of one node, and a program has no nodes: use policy_gradient": (
                isinstance(self.env, AgentProgram)
            ),
            'rollout.tree: with several turns, pairs at every turn need tree = "full" without branching': (
                many_turns and (self.rollout.tree != "full" or self.rollout.branching is not None)
            ),
            'algo.normalize = "std" is for advantages: set it to "none"': self.algo.normalize == "std",
            "algo.beta adds a second penalty: set it to 0, and use algo.preference_beta": self.algo.beta > 0,
            "train.lag: margins are taken to the weights that sampled, so set it to 0": self.train.lag > 0,
            "algo.importance_cap would weigh tokens, not preferences: remove it": self.algo.importance_cap is not None,
            'algo.ratio = "sequence": preferences take no ratio, so remove it': self.algo.ratio == "sequence",
            'algo.loss_norm = "sequence_mean": margins add up tokens, so take "sequence_sum"': (
                self.algo.loss_norm == "sequence_mean"
            ),
        }
        _refuse('algo.loss = "madpo"', misfits)
        return self

    @model_validator(mode="after")
    def _probes_fit(self) -> RunConfig:
        if self.rollout.probe_size is None:
            return self
        misfits = {
            "env: the episodes of a program cannot be probed": isinstance(self.env, AgentProgram),
            "env.num_turns must be 1, because rewards of the first turn do not decide about later ones": (
                self.env.num_turns > 1
            ),
            "train.lag must be 0": self.train.lag > 0,
            "rollout.crossed_pairs draws other pairs for a probe than for its group: probe whole groups": (
                self.rollout.crossed_pairs is not None and self.rollout.probe_size < self.rollout.group_size
            ),
            'algo.loss must be "policy_gradient"': self.algo.loss != "policy_gradient",
            "algo.estimator must have siblings as baseline, because others learn from equal rewards, too": (
                not self.all_have_baselines
            ),
        }
        _refuse("rollout.probe_size", misfits, "; or remove probe_size")
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
        misfits = {
            f"of {most} joint actions with a completion it leaves out none: {remedy}": self.algo.lenience * most < 1,
            'algo.loss must be "policy_gradient"': self.algo.loss != "policy_gradient",
            "algo.estimator must have siblings as baseline: the best returns are all above the mean": (
                not self.all_have_baselines
            ),
        }
        _refuse("algo.lenience", misfits, "; or set lenience to 0")
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
        if self.rollout.branching == 1 and self.env.num_turns > 1 and self.algo.gamma > 0:
            raise ValueError(
                "rollout: with branching = 1 no joint action is credited for later turns; set it to 2 or more, or "
                'set tree = "chains", which continues every joint action at less cost'
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

    @model_validator(mode="after")
    def _rows_have_agents(self) -> RunConfig:
        known = {(agent.name, agent.model, agent.weights) for agent in self.agents}
        for row in self.baselines.rows:
            roles = [agent.role for agent in self.agents] if isinstance(row.env, AgentProgram) else list_roles(row.env)
            _check_roles(f"baselines: row {row.name!r}", sorted(roles), row.agents)
            for agent in row.agents:
                if (agent.name, agent.model, agent.weights) not in known:
                    raise ValueError(
                        f"baselines: row {row.name!r} uses agent {agent.name!r}, which is not one of the run's agents "
                        "(its name, model and weights must match)"
                    )
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

    def list_warnings(self) -> list[str]:
        """Warnings about valid values that users of the run should know of, one line each."""
        if self.train.num_iterations == 0:
            return []
        crediting = [agent for agent in self.agents if agent.trained and self.algo.loss != "madpo"]
        chosen = dict.fromkeys(self.estimator_of(agent) for agent in crediting)
        found = [f"estimator {name!r}: {ESTIMATORS[name].bias}" for name in chosen if ESTIMATORS[name].bias]
        if self.algo.lenience:
            found.append(
                f"algo.lenience = {self.algo.lenience:g}: completions are compared by what they earn with their best "
                "partners, not on average, so the gradient is biased"
            )
        if self.algo.normalize == "std":
            found.append(
                "algo.normalize = 'std': groups with nearly equal returns weigh as much as groups with very different "
                "ones; the paper does not divide by the standard deviation"
            )
        starts_trained = self.registry.continue_from_champion or start_weights(
            [agent for agent in self.agents if agent.trained]
        )
        if self.algo.beta > 0 and starts_trained:
            found.append(
                f"algo.beta = {self.algo.beta:g} pulls agents that start from trained weights back towards their base "
                "model, which is the reference of the penalty; set algo.beta = 0 to keep what they have learnt"
            )
        if self.algo.loss == "madpo" and self.algo.update_epochs == 1:
            found.append(
                "algo.loss = 'madpo' with one epoch never leaves the margin 0, where only the order of returns "
                "matters; set algo.update_epochs to 2 or more"
            )
        found += self._list_unused_options()
        if self.algo.max_sampling_gap is not None and self.train.lag:
            found.append(
                "algo.max_sampling_gap has no effect after the first iteration, because with train.lag = "
                f"{self.train.lag} later samples are never of the newest weights; set train.lag = 0, or leave the "
                "limit out and watch update/sampling_gap"
            )
        if long_warmup := self.optim.describe_long_warmup(self.train.num_iterations):
            found.append(long_warmup)
        return found

    def _list_unused_options(self) -> Iterator[str]:
        """Warnings about options that are set, but have no effect beside the others."""
        sections: dict[str, Section] = {f"agents.{agent.name}": agent for agent in self.agents}
        sections |= {
            name: getattr(self, name) for name in ("reward", "lora", "rollout", "algo", "optim", "critic", "eval")
        }
        changed = [
            f"{name}.{option}"
            for name, section in sections.items()
            for option, field in type(section).model_fields.items()
            if getattr(section, option) != field.default
        ]
        for reason, keys in self._list_ineffective():
            if unused := [key for key in changed if key in keys]:
                has, them = ("has", "the option") if len(unused) == 1 else ("have", "the options")
                yield f"{', '.join(unused)} {has} no effect, because {reason}, or leave {them} out"

    def _list_ineffective(self) -> Iterator[tuple[str, Collection[str]]]:
        """Reasons why options have no effect in this run, each with a remedy and these options, set or not."""
        if count_turns(self.env) == 1:
            later = (
                "rollout.tree",
                "rollout.branching",
                "rollout.termination_threshold",
                "algo.gamma",
                "critic.gae_lambda",
                "eval.stop_above",
            )
            yield "episodes have one turn; set env.num_turns to 2 or more, if the environment has this key", later
        elif count_priced_turns(self.env) == 1:
            early = ("rollout.termination_threshold", "eval.stop_above")
            yield "no turn before the last is priced; set env.num_turns to more, if the environment can take it", early
        else:
            limits = {
                "rollout.termination_threshold": self.rollout.termination_threshold,
                "eval.stop_above": self.eval.stop_above,
            }
            never = [key for key, limit in limits.items() if limit is not None and self.reward.fraction(limit) >= 1]
            yield "no reward exceeds its maximum; set a smaller value", never
        if not self.trains_critics:
            critic = [f"critic.{option}" for option in CriticConfig.model_fields]
            yield "no trained agent has an estimator with a critic; set algo.estimator to one", critic
        if self.algo.loss == "madpo":
            estimators = [f"agents.{agent.name}.estimator" for agent in self.agents]
            unused = ("algo.estimator", *estimators, "algo.clip_low", "algo.clip_high", "reward.local_weight")
            yield "preferences take no estimator, ratio or local reward; set algo.loss to 'policy_gradient'", unused
        else:
            yield "algo.loss is not 'madpo'; set it", ("algo.preference_beta",)
            if self.algo.update_epochs == 1:
                ratio = ("algo.ratio", "algo.clip_low", "algo.clip_high")
                yield "in the only epoch every ratio is 1; set algo.update_epochs to 2 or more", ratio
        if isinstance(self.env, AgentProgram):
            yield "programs write their prompts themselves; shorten these there", ("rollout.leave_out_long",)
        else:
            yield "only programs ask an agent several times; set env.kind to 'program'", ("algo.siblings",)
        if (most := max(self.count_acting())) == 1:
            yield "at most one agent acts at a turn; let several act at once", ("rollout.joint_mode",)
        elif (self.rollout.crossed_pairs or 0) >= self.rollout.group_size**most:
            yield "a node has no more joint actions; set a smaller value", ("rollout.crossed_pairs",)
        if self.rollout.top_p == 1 and self.rollout.top_k == 0:
            yield "no token is left out of a sample; set rollout.top_p or rollout.top_k", ("rollout.keep_support",)
        if all(agent.weights == "full" for agent in self.agents):
            lora = [f"lora.{option}" for option in LoraConfig.model_fields]
            yield "no agent has an adapter; set the weights of one to 'lora'", lora
        if self.rollout.probe_size is None:
            yield "nothing is probed; set rollout.probe_size", ("rollout.max_draws",)
        if all(agent.lr is not None for agent in self.agents if agent.trained):
            yield "every trained agent has an lr of its own; remove these", ("optim.lr",)
        untrained = [f"agents.{agent.name}.lr" for agent in self.agents if not agent.trained]
        yield "untrained agents keep their weights; set trained = true", untrained

    def seeded_eval(self) -> EvalConfig:
        """``eval`` with a seed that also follows from ``train.seed``, so that runs do not share the luck of samples."""
        return self.eval.model_copy(update={"seed": derive_seed("evaluate", self.eval.seed, self.train.seed)})

    def resolved(self, *, secrets: bool = False) -> str:
        """The whole tree as JSON, defaults included; :meth:`RunStore.config` reads it back, with its ``secrets``."""
        return self.model_dump_json(indent=2, context={"secrets": secrets})


def _refuse(option: str, misfits: Mapping[str, bool], remedy: str = "") -> None:
    """Raise ValueError, naming all misfits, if any of ``misfits`` is found. Its keys say what must change, and why."""
    if found := [misfit for misfit, is_found in misfits.items() if is_found]:
        raise ValueError(f"{option}: {'; '.join(found)}{remedy}")


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
