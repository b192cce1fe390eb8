"""The sections of a run's configuration that neither are plug-ins nor contain any: rollout, algorithm, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from magrpo.algo.advantages import EstimatorName
from magrpo.algo.episodes import Siblings
from magrpo.plugins import Section
from magrpo.types import AnswerStats, LossNorm, Normalize


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
    tree: Literal["chains", "full"] = "chains"
    """How joint actions continue in later turns. ``chains``: each by one, at K G completions per problem and agent;
    ``full``: each by G, at G^K completions."""
    termination_threshold: float | None = None
    """End an episode at a joint action whose reward exceeds this value; the reward also counts for the remaining turns.
    None: never."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature; the update computes log-probabilities at the same temperature. vLLM samples no lower."""
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
    ``max_new_tokens``. If false, a run with such a problem is refused before training. Programs write their prompts
    themselves, so neither holds for them: each request that does not fit is refused, and the program may go on."""

    @model_validator(mode="after")
    def _check_tree(self) -> RolloutConfig:
        if self.crossed_pairs is not None and self.crossed_pairs % self.group_size:
            raise ValueError(f"crossed_pairs must be a multiple of group_size ({self.group_size})")
        if self.crossed_pairs is not None and self.joint_mode != "crossed":
            raise ValueError(
                f'crossed_pairs needs joint_mode = "crossed", not {self.joint_mode!r}: remove it, or set '
                "rollout.joint_mode"
            )
        if self.probe_size is not None and self.probe_size > self.group_size:
            raise ValueError(f"probe_size = {self.probe_size} exceeds group_size = {self.group_size}: lower it")
        return self


class PenaltyConfig(Section):
    """Costs of faulty answers, subtracted from the joint reward in training and evaluation, whatever the reward.

    A cost is a share of the reward's maximum. The whole team bears the costs of all its agents' answers.
    """

    cut_off: float = Field(0.0, ge=0, le=10)
    """Cost of an answer that reaches ``rollout.max_new_tokens`` before its end. A program that chose where its answer
    ends pays nothing."""
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
    """Weight of the KL penalty (k3 estimate) to the frozen reference policy in the loss. The reference is the untrained
    base model, also for agents that start from trained weights, which it pulls back. 0: no penalty."""
    importance_cap: float | None = Field(None, gt=0)
    """Maximum importance weight of a token (trainer probability over engine probability). It corrects for an engine
    with another precision and for samples of earlier weights (``train.lag``), but not for ``top_p`` and ``top_k``.
    None: no correction."""
    kernel: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of the loss. ``auto``: Triton on CUDA, torch elsewhere."""


class OptimConfig(Section):
    """AdamW, one optimizer for each agent."""

    lr: float = Field(2e-5, gt=0)
    """Peak learning rate. The default is for whole models; adapters need about ten times as much."""
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
    larger; the run then evaluates, and ``ended.json`` states the iterations that it took. Studies set it
    (docs/studies.md). None: no limit."""
    seed: int = Field(0, ge=0)
    """Seed for everything random in the run."""
    lag: Literal[0, 1, 2] = 0
    """Number of updates by which the sampling weights lag behind; that many iterations are sampled and scored while an
    update runs. 0: strictly on-policy. Above 0, ``algo.importance_cap`` is required."""
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
