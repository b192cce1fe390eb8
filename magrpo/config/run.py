"""The configuration of a run: one frozen tree, TOML in, resolved JSON out.

Imports no heavy library: a plug-in's class is imported only when a configuration names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from magrpo.algo.advantages import ESTIMATORS, EstimatorName
from magrpo.algo.episodes import Siblings
from magrpo.checks.envs import count_turns, list_acting, list_roles
from magrpo.checks.rewards import check_maxima
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, weight_holders
from magrpo.config.services import NotifyConfig, RegistryConfig, TrackingConfig
from magrpo.config.validate import read_toml, validate_config
from magrpo.envs.program import AgentProgram
from magrpo.errors import check_name, quote_value
from magrpo.interfaces import TakesReturned
from magrpo.plugins import Section, plugin_field
from magrpo.seeds import derive_seed
from magrpo.types import PENALTY, AnswerStats, LossNorm, Normalize

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


class RolloutConfig(Section):
    """The joint rollout."""

    problems_per_iteration: int = Field(16, ge=1)
    """Number of problems drawn in each iteration."""
    group_size: int = Field(8, ge=1)
    """G, the number of completions that each agent samples at a node."""
    probe_size: int | None = Field(None, ge=2)
    """Sample this many of the G completions first, and the others only where the rewards of these differ; further
    problems are drawn in place of the rest, which would teach nothing. ``group_size``: probe with whole groups. None:
    do not probe."""
    max_draws: int = Field(4, ge=1)
    """With ``probe_size``: an iteration draws at most this many times ``problems_per_iteration`` problems."""
    joint_mode: Literal["aligned", "crossed"] = "aligned"
    """``aligned``: G joint actions, with completions paired by index; ``crossed``: every combination of completions."""
    crossed_pairs: int | None = Field(None, ge=1)
    """In crossed mode, number of joint actions scored at a node, chosen as a balanced random subset. None: all."""
    old_partners: int = Field(0, ge=0)
    """In crossed mode, number of earlier completions of every partner for the same problem, the newest first, that the
    completions of each agent are paired with as well. This costs programs, but no tokens (see docs/algorithm.md). 0:
    none."""
    tree: Literal["chains", "full"] = "chains"
    """How joint actions continue in later turns. ``chains``: each by one, at K G completions per problem and agent;
    ``full``: each by G, at G^K completions."""
    branching: int | None = Field(None, ge=1)
    """In a full tree, number of joint actions of a node that continue, chosen as a random subset; at least 2. None:
    all."""
    termination_threshold: float | None = None
    """End an episode at a joint action whose reward exceeds this value; the reward also counts for the remaining turns.
    None: never."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the update computes log-probabilities at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling threshold; 1 turns it off. Below 1 it biases the gradient unless ``keep_support`` is on."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 turns top-k sampling off. Above 0 it biases the gradient unless
    ``keep_support`` is on."""
    keep_support: bool = False
    """Record the tokens that remain after ``top_p`` and ``top_k``, and train the policy over these tokens only."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum length of a completion, in tokens."""
    leave_out_long: bool = False
    """Leave out problems whose first prompt leaves no room in the context window for a completion of
    ``max_new_tokens``. If false, a run with such a problem is refused before training."""

    @model_validator(mode="after")
    def _check_tree(self) -> RolloutConfig:
        if self.crossed_pairs is not None and self.crossed_pairs % self.group_size:
            raise ValueError(f"crossed_pairs must be a multiple of group_size ({self.group_size})")
        if self.branching is not None and self.tree != "full":
            raise ValueError(f'branching needs tree = "full", not {self.tree!r}: remove it, or set rollout.tree')
        if self.probe_size is not None and self.probe_size > self.group_size:
            raise ValueError(f"probe_size = {self.probe_size} exceeds group_size = {self.group_size}: lower it")
        return self


class PenaltyConfig(Section):
    """Costs of faulty answers, subtracted from the joint reward in training and evaluation, whatever the reward.

    A cost is a share of the reward's maximum. The whole team bears the costs of all its agents' answers.
    """

    cut_off: float = Field(0.0, ge=0, le=10)
    """Cost of an answer that reaches ``rollout.max_new_tokens`` before its end."""
    copied: float = Field(0.0, ge=0, le=10)
    """Cost of an answer whose every word lies in a passage of eight or more words copied from its prompt; in proportion
    if only a part does. Leave it at 0 for programs, which repeat their specification."""
    repeated: float = Field(0.0, ge=0, le=10)
    """Cost of an answer whose every word lies in a passage of eight or more words that it has already written; in
    proportion if only a part does."""
    strayed: float = Field(0.0, ge=0, le=10)
    """Cost of an answer none of whose long words begins like a word of its prompt; in proportion if fewer than half do.
    For texts that must stay with their prompt, such as summaries."""

    @property
    def is_on(self) -> bool:
        """Whether any fault has a cost."""
        return any((self.cut_off, self.copied, self.repeated, self.strayed))

    def price_answer(self, stats: AnswerStats) -> float:
        """The cost of one answer, as a share of the reward's maximum."""
        cut_off = self.cut_off if stats.cut_off else 0.0
        copies = self.copied * stats.copied_frac + self.repeated * stats.repeated_frac
        return cut_off + copies + self.strayed * stats.strayed_frac


class AlgoConfig(Section):
    """The algorithm: returns, advantages and loss."""

    estimator: EstimatorName = "magrpo"
    """Estimator of the group-relative advantage (see docs/algorithm.md)."""
    normalize: Normalize = "none"
    """``std``: divide advantages by the standard deviation of their group; ``none``: do not."""
    siblings: Siblings = "agent"
    """For programs: the returns with which the return of a call is compared. ``agent``: those of all episodes of the
    problem; ``agent_turn``: those of the episodes in which the agent was asked at least as often."""
    lenience: float = Field(0.0, ge=0, lt=1)
    """In crossed mode, the share of a completion's joint actions that its return leaves out, those that earn least. 0:
    none; 0.75 in groups of four: all but the best. It keeps answers alive that are good with the right partner, and
    biases the gradient (see docs/algorithm.md)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor between turns, for rewards and for the loss of later turns. With 0 only the first turn trains."""
    loss: Literal["policy_gradient", "madpo"] = "policy_gradient"
    """``policy_gradient``: completions are pushed by their advantages; ``madpo``: pairs of joint actions of a node are
    preferences, which all agents learn together, and no estimator is used (see docs/algorithm.md)."""
    preference_beta: float = Field(0.1, gt=0)
    """With ``madpo``: how far policies may move from the weights that sampled; less lets them move further."""
    loss_norm: LossNorm = "sequence_sum"
    """How token losses are averaged (see docs/algorithm.md)."""
    update_epochs: int = Field(1, ge=1)
    """Number of passes over the samples of an iteration. Above 1 the loss uses the clipped probability ratio."""
    ratio: Literal["token", "sequence"] = "token"
    """The probability ratio of later epochs. ``token``: each token has its own; ``sequence``: all tokens of a
    completion have the geometric mean of theirs (GSPO), which is closer to 1 and needs a narrower clip range."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The probability ratio is clipped at 1 - clip_low; used if ``update_epochs`` > 1."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high; used if ``update_epochs`` > 1."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty (k3 estimate) to the frozen reference policy in the loss. 0: no penalty."""
    importance_cap: float | None = Field(None, gt=0)
    """Maximum importance weight of a token (trainer probability over engine probability). It corrects for an engine
    with another precision and for samples of earlier weights (``train.lag``), but not for ``top_p`` and ``top_k``.
    None: no correction."""
    max_sampling_gap: float | None = Field(None, gt=0)
    """Stop the run if an agent's ``sampling_gap`` on samples of the newest weights exceeds this value, which means that
    the engine holds other weights. None: never."""
    kernel: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of the loss. ``auto``: Triton on CUDA, torch elsewhere."""


class OptimConfig(Section):
    """AdamW, one optimizer for each agent."""

    lr: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up; ``linear`` and ``cosine`` reach 0 after the last iteration."""
    warmup_iterations: int = Field(0, ge=0)
    """Number of iterations over which the learning rate rises linearly from 0. A run with fewer iterations never
    reaches the peak and prints a warning."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW (decoupled)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm of each agent; larger gradients are scaled down."""
    micro_batch_tokens: int | Literal["auto"] = "auto"
    """Number of tokens, with padding, in a forward and backward pass; affects only speed, memory and rounding.
    ``auto``: 1024 on a CPU, whose caches hold their activations (with prompts of 1000 tokens or more, set 4096). On a
    GPU the largest power of two, from 2048 to 65536, whose activations take half of the memory that ``--dry-run``
    estimates to be left; 16384 on each of several update ranks, which all need the same number."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass and compute the layers again there. Gradients are the same;
    it takes about a third more time and a fraction of the memory."""
    lanes: int = Field(1, ge=1, le=4096)
    """Number of partial sums of each agent's gradient, a power of two; update ranks divide them among themselves (see
    docs/scale.md). It changes rounding, while the number of ranks does not."""

    @field_validator("micro_batch_tokens", mode="before")
    @classmethod
    def _is_auto_or_positive(cls, value: object) -> object:
        if value != "auto" and (type(value) is not int or value < 1):
            raise ValueError('must be a number of tokens, at least 1, or "auto"')
        return value

    def describe_long_warmup(self, num_iterations: int) -> str:
        """A warning if a run of ``num_iterations`` ends during warm-up; otherwise an empty text."""
        if not 0 < num_iterations < self.warmup_iterations:
            return ""
        return (
            f"optim.warmup_iterations = {self.warmup_iterations} exceeds train.num_iterations = {num_iterations}: the "
            f"learning rate ends at {self.lr * num_iterations / self.warmup_iterations:.3g}, below its peak of "
            f"optim.lr = {self.lr:g}; for a short trial set optim.warmup_iterations=0"
        )

    def count_micro_batch_tokens(self, device: str) -> int:
        """The number of tokens of a micro-batch on a type of device, "cpu" or "cuda", of unknown memory.

        See :func:`magrpo.planning.card.settle_micro_batches` for one GPU.
        """
        if self.micro_batch_tokens == "auto":
            return 1024 if device == "cpu" else 16384
        return self.micro_batch_tokens

    @field_validator("lanes")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"must be a power of two, such as {1 << (value.bit_length() - 1)}, not {value}")
        return value


class CriticConfig(Section):
    """The critics of agents whose estimator has one (``iac``, ``maac``): linear value heads on the frozen bases."""

    lr: float = Field(3e-3, gt=0)
    """Learning rate of the critics, which have AdamW optimizers of their own."""
    epochs: int = Field(10, ge=1)
    """Number of passes of a critic over the observations of an iteration."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation over turns. 1: returns are sampled ones; less: the critic's value of
    the next turn stands for a part of what follows. Without effect if there is one turn."""


class TrainConfig(Section):
    """The length of the run."""

    num_iterations: int = Field(100, ge=0)
    """Number of training iterations; each consists of rollout, score, credit and update."""
    max_tokens: int | None = Field(None, ge=1)
    """End training after the first iteration by which it has generated this many tokens, even if ``num_iterations`` is
    larger; the run then evaluates, and its configuration states the iterations that it took. Studies set it
    (docs/studies.md). None: no limit."""
    seed: int = Field(0, ge=0)
    """Seed for everything random in the run."""
    lag: Literal[0, 1, 2] = 0
    """Number of updates by which the sampling weights lag behind; that many iterations are sampled and scored while an
    update runs. 0: strictly on-policy. Above 0, set ``algo.importance_cap`` too."""
    keep_weights: Literal["all", "evaluated"] = "all"
    """Checkpoints that keep their weights. ``all``: every checkpoint; ``evaluated``: evaluated checkpoints and those
    that the run still needs. The others can be computed again with ``--from-stage``, but you cannot ask, evaluate or
    export them."""


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    every: int = Field(20, ge=1)
    """Number of iterations between evaluations; the run also evaluates before and after training."""
    num_samples: int = Field(4, ge=1)
    """Number of joint trajectories sampled for each problem."""
    max_problems: int | None = Field(None, ge=1)
    """Maximum number of problems evaluated in each split, spread evenly over its levels or topics. None: all."""
    stop_above: float | None = None
    """End a trajectory as soon as its reward exceeds this value, in reward units. This is an oracle: the reward counts
    hidden tests, which are unknown in real use. None: take every turn."""
    seed: int = Field(1234, ge=0)
    """Seed for the samples of all evaluations of a run, together with ``train.seed``."""


REFERENCE = "naive"
"""Name of the baseline row that all other rows are compared with."""


class BaselineRow(Section):
    """One row of a table of baselines: one way to answer, compared with the others."""

    name: Annotated[str, AfterValidator(check_name)]
    """Name of the row in files and metrics."""
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
    """Rows that cannot be computed, by name, with the reason."""


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
    root: Path = Path("runs")
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
            'algo.loss must be "policy_gradient"': self.algo.loss != "policy_gradient",
            "algo.estimator must have siblings as baseline, because others learn from equal rewards, too": (
                not self.all_have_baselines
            ),
        }
        _refuse("rollout.probe_size", misfits, "; or remove probe_size")
        return self

    @model_validator(mode="after")
    def _old_partners_fit(self) -> RunConfig:
        if not self.rollout.old_partners:
            return self
        misfits = {
            "env: completions in an episode of a program depend on each other and cannot be paired anew": (
                isinstance(self.env, AgentProgram)
            ),
            "agents: a single agent has no partner": len(self.agents) == 1,
            "env.num_turns must be 1, because later turns answer the partners of their own episode": (
                self.env.num_turns > 1
            ),
            'rollout.joint_mode must be "crossed"': self.rollout.joint_mode != "crossed",
            "rollout.probe_size must be removed, because probes choose problems by rewards without old partners": (
                self.rollout.probe_size is not None
            ),
            "train.lag must be 0": self.train.lag > 0,
            'algo.loss must be "policy_gradient"': self.algo.loss != "policy_gradient",
            "algo.estimator must have no critic, which values the partners of today": self.trains_critics,
        }
        _refuse("rollout.old_partners", misfits, "; or set old_partners to 0")
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
            "rollout.old_partners must be 0": self.rollout.old_partners > 0,
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
        """The estimator of each agent that has one of its own."""
        return {agent.name: agent.estimator for agent in self.agents if agent.estimator is not None}

    def list_warnings(self) -> list[str]:
        """Warnings about valid values that users of the run should know of, one line each."""
        if self.train.num_iterations == 0:
            return []
        chosen = dict.fromkeys(self.estimator_of(agent) for agent in self.agents if agent.trained)
        found = [f"estimator {name!r}: {ESTIMATORS[name].bias}" for name in chosen if ESTIMATORS[name].bias]
        if self.algo.normalize == "std":
            found.append(
                "algo.normalize = 'std': groups with nearly equal returns weigh as much as groups with very different "
                "ones; the paper does not divide by the standard deviation"
            )
        if self.critic != CriticConfig() and not self.trains_critics:
            found.append("critic: no trained agent has an estimator with a critic, so this section has no effect")
        if self.algo.loss == "madpo" and self.algo.update_epochs == 1:
            found.append(
                "algo.loss = 'madpo' with one epoch never leaves the margin 0, where only the order of returns "
                "matters; set algo.update_epochs to 2 or more"
            )
        if self.algo.ratio == "sequence" and self.algo.update_epochs == 1:
            found.append(
                "algo.ratio = 'sequence' has no effect in the only epoch, in which every ratio is 1; set "
                "algo.update_epochs to 2 or more"
            )
        if long_warmup := self.optim.describe_long_warmup(self.train.num_iterations):
            found.append(long_warmup)
        return found

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
