"""Every value that passes between stages, on one page.

Standard library only. :mod:`magrpo.run.store` writes these types to disk, so the names and order of fields are a file
format.

Axes: ``A`` agents, ``G`` group size, ``K`` turns, ``B`` sequences, ``T`` tokens, ``V`` vocabulary, ``D`` model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, get_args

Split = Literal["train", "test", "ood"]
Mode = Literal["sampled", "greedy"]
MessageRole = Literal["system", "user", "assistant"]
EpisodeStatus = Literal["finished", "failed", "timed_out", "silent", "infra_error"]
Normalize = Literal["none", "std"]
LossNorm = Literal["sequence_sum", "sequence_mean", "token_mean", "dr_grpo"]
_Unfinished = Literal["timeout", "crash", "memory", "output_limit", "protocol", "load_error", "not_run"]
Unjudged = Literal["infra_error", "test_error"]
"""Statuses without a verdict on the program: the sandbox failed, or the problem's own test cannot be run."""
CaseStatus = Literal["pass", "wrong", "exception", _Unfinished, Unjudged]
UNJUDGED: frozenset[CaseStatus] = frozenset(get_args(Unjudged))


# --------------------------------------------------------------------------------------------- problems and prompts
@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in the HumanEval form.

    ``prompt`` is the preamble, the signature and the docstring of ``entry_point``; ``test`` is source that defines
    ``check(candidate)``; ``canonical_solution`` continues ``prompt``. ``tags``: free labels (``level``, ``split``).
    ``hidden_test``: further tests, which only the reward sees and agents are never shown.
    """

    task_id: str
    prompt: str
    entry_point: str = ""
    test: str = ""
    canonical_solution: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    hidden_test: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    role: MessageRole
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The messages that one agent sees before it acts."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    observation: Observation
    token_ids: tuple[int, ...]


# --------------------------------------------------------------------------------------------------------- sampling
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters: ``temperature = 0`` is greedy; ``top_k = 0`` and ``top_p = 1`` switch truncation off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    keep_support: bool = False
    """Whether to record the tokens that top-k and top-p keep, and to take log-probabilities over them."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from only a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def records_support(self) -> bool:
        """Whether completions hold their support: it was requested and is not the whole vocabulary."""
        return self.keep_support and self.truncates


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion. Equal requests give equal completions, whatever else is in the batch."""

    agent: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Action:
    """One completion.

    ``token_ids``: exactly the sampled tokens, with the end-of-sequence token if it was sampled. ``text``: the tokens
    decoded, without special tokens. ``sampling_logps``: natural log-probabilities of the tokens at the sampling
    temperature, before top-p and top-k, or over ``support`` if it was recorded. ``policy_version``: number of updates
    of the weights (0: untrained). ``support``: the ids that each token was sampled from, ascending; empty if none were
    recorded or the whole vocabulary was kept.
    """

    agent: str
    text: str
    token_ids: tuple[int, ...]
    sampling_logps: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    support: tuple[tuple[int, ...], ...] = ()


# -------------------------------------------------------------------------------------------------------- execution
@dataclass(frozen=True, slots=True)
class Execution:
    """One program to run against one test.

    ``watch``: name of a function of the program whose calls are counted (``aux``), or empty. ``variant_of``: source of
    the program that this one is a variant of, or empty. A variant may share a process with others if that program may.
    """

    source: str
    entry_point: str
    test: str
    watch: str = ""
    variant_of: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """The verdict on one ``assert``. ``message`` may quote the candidate; it is escaped and limited in length."""

    status: CaseStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class IsolationLevel:
    """The strongest isolation level that works here. ``refused``: the reason against each stronger level."""

    level: str
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """The result of an :class:`Execution`.

    ``status``: ``pass`` if every case passed, else the status of the first case that did not. ``level``: the isolation
    level. ``watched_calls``: number of calls of ``Execution.watch`` that returned; the candidate's process reports
    it, so it may lie. ``forgeable``: the test ran in the candidate's process. ``compiles``: the program compiled within
    its limits, before any of it ran.
    """

    status: CaseStatus
    cases: tuple[Case, ...]
    level: str
    duration_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    watched_calls: int = 0
    forgeable: bool = False
    compiles: bool = True

    @property
    def statuses(self) -> frozenset[CaseStatus]:
        """The status of the report and the statuses of its cases."""
        return frozenset({self.status, *(case.status for case in self.cases)})

    @property
    def tests_passed(self) -> int:
        return sum(case.status == "pass" for case in self.cases)

    @property
    def tests_total(self) -> int:
        return len(self.cases)


Reports = Mapping[str, ExecutionReport]
"""The reports of the programs made of one joint action, by the names that its reward gave them."""
RoleTexts = Mapping[str, str]
"""The text that each role has written."""


@dataclass(frozen=True, slots=True)
class JointReward:
    """The joint reward of one joint action: ``total = scale * sum(parts) + shift``.

    In a scored turn, ``parts`` also holds :data:`PENALTY` if the section ``penalty`` of the configuration is on.
    """

    total: float
    parts: dict[str, float]
    local: dict[str, float] = field(default_factory=dict)
    """Additional rewards of single roles, already weighted; keyed by agent in a scored turn."""

    def earned_by(self, agent: str) -> float:
        """The reward of one agent in a scored turn: the joint one, and its local one if there is any."""
        return self.total + self.local.get(agent, 0.0)


PENDING = JointReward(0.0, {})
"""The reward of a joint action that cannot be priced yet, because some role has not written."""
PENALTY = "penalty"
"""Name of the part, at most 0, that the faults of the answers cost, and of its share of the maximum in evaluations."""


# ------------------------------------------------------------------------------------------- episodes of programs
@dataclass(frozen=True, slots=True)
class Call:
    """One completion that a program asked an agent for. Tokens and messages that an earlier call holds are left out.

    ``extends``: the earlier call of the episode, by number from 0, whose messages, prompt and completion begin those of
    this one; -1: none. ``prompt_ids`` and ``messages``: what follows these. ``messages`` have OpenAI's form.
    ``overruled``: sampling parameters that the program asked for and did not get, because the run decides them.
    ``ends_early``: whether the program chose where the answer ends, by a lower limit of tokens or by stop strings.
    """

    agent: str
    extends: int
    prompt_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    action: Action
    overruled: dict[str, Any] = field(default_factory=dict)
    ends_early: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a program, with the calls of its agents in the order of their answers.

    ``status``: ``finished``; ``failed`` by an exception or an unusable result; ``timed_out``; ``silent``, without any
    call; ``infra_error``, through no fault of the program. ``message``: the reason, if it did not finish. ``texts``:
    the text of each role of the reward. ``returned``: the program's own reward; None if the reward prices the texts.
    """

    calls: tuple[Call, ...]
    texts: dict[str, str]
    status: EpisodeStatus = "finished"
    message: str = ""
    returned: JointReward | None = None

    @property
    def is_priced_by_texts(self) -> bool:
        """Whether the reward prices the texts: the program finished, and returned no reward of its own."""
        return self.status == "finished" and self.returned is None

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """The whole prompt of call ``number``, in tokens."""
        *earlier, last = self._list_chain(number)
        begun = ((*call.prompt_ids, *call.action.token_ids) for call in earlier)
        return (*chain.from_iterable(begun), *last.prompt_ids)

    def messages(self, number: int) -> tuple[dict[str, Any], ...]:
        """All messages of call ``number``."""
        return tuple(message for call in self._list_chain(number) for message in call.messages)

    def _list_chain(self, number: int) -> list[Call]:
        """Call ``number`` after the calls that it extends, the first one first."""
        calls = [self.calls[number]]
        while calls[-1].extends >= 0:  # a loop: a program may ask more often than Python lets a function recurse
            calls.append(self.calls[calls[-1].extends])
        return calls[::-1]


# --------------------------------------------------------------------------------------------------------- rollouts
@dataclass(frozen=True, slots=True)
class PastTurn:
    """One earlier joint action of a node's history, as the environment needs it for feedback."""

    texts: dict[str, str]
    reward: JointReward
    reports: dict[str, ExecutionReport]
    answers: dict[str, AnswerStats] = field(default_factory=dict)
    """Statistics of ``texts``, for the penalty of a later joint action that is priced with them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One joint action at a node: for each agent the index of its completion in ``RolloutGroup.actions``."""

    picks: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScoredTurn:
    """A joint action with its reward. ``masked``: a report is :data:`UNJUDGED`; the turn is ignored."""

    picks: dict[str, int]
    reward: JointReward
    reports: dict[str, ExecutionReport]
    masked: bool = False


T = TypeVar("T", Turn, ScoredTurn)


@dataclass(frozen=True, slots=True)
class RolloutGroup(Generic[T]):
    """One node of a problem's tree: one history, ``G`` completions per agent, and the joint actions made of them.

    Dicts are keyed by agent, in the order of the config, and hold the agents that act at this turn. ``path``: index of
    the joint action taken at each earlier turn, so ``len(path)`` is the turn, from 0. ``history``: the earlier turns,
    or, in a trajectory that was retried, those of the latest try. ``episodes``: if a program asks the agents, one
    episode for each joint action; ``prompts``, ``actions`` and all picks are then empty.
    """

    problem: Problem
    path: tuple[int, ...]
    history: tuple[PastTurn, ...]
    prompts: dict[str, Prompt]
    actions: dict[str, tuple[Action, ...]]
    turns: tuple[T, ...]
    episodes: tuple[Episode, ...] = ()

    def with_scores(self, turns: tuple[ScoredTurn, ...]) -> RolloutGroup[ScoredTurn]:
        """The node with its joint actions scored."""
        return RolloutGroup(self.problem, self.path, self.history, self.prompts, self.actions, turns, self.episodes)

    def texts(self, turn: Turn | ScoredTurn) -> dict[str, str]:
        """The completions of one joint action by agent."""
        return {agent: self.actions[agent][i].text for agent, i in turn.picks.items()}

    def latest(self, turn: Turn | ScoredTurn) -> dict[str, str]:
        """The latest completion of every agent that has acted up to and including ``turn``."""
        earlier = {agent: text for past in self.history for agent, text in past.texts.items()}
        return earlier | self.texts(turn)


@dataclass(frozen=True, slots=True)
class NodeScores:
    """The scored joint actions of one node; ``task_id`` and ``path`` find the rest of the node in the rollout."""

    task_id: str
    path: tuple[int, ...]
    turns: tuple[ScoredTurn, ...]


@dataclass(frozen=True, slots=True)
class NodeValues:
    """The values that critics gave one node before they learnt from it, by critic: an agent's own, or "" (central)."""

    task_id: str
    path: tuple[int, ...]
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrajectoryStep:
    """One turn of a trajectory, by agent; the whole ``episode`` if a program asked the agents."""

    prompts: dict[str, Prompt]
    actions: dict[str, Action]
    turn: ScoredTurn
    episode: Episode | None = None

    @classmethod
    def of(cls, group: RolloutGroup[ScoredTurn], index: int) -> TrajectoryStep:
        """The joint action ``index`` of a node."""
        turn = group.turns[index]
        actions = {agent: group.actions[agent][i] for agent, i in turn.picks.items()}
        return cls(group.prompts, actions, turn, group.episodes[index] if group.episodes else None)

    @property
    def all_actions(self) -> list[tuple[str, Action]]:
        """Every completion with its agent, in the order of the agents or of an episode's calls."""
        calls = () if self.episode is None else self.episode.calls
        return [*self.actions.items(), *((call.agent, call.action) for call in calls)]

    @property
    def latest_actions(self) -> dict[str, Action]:
        """The latest completion of every agent that acted."""
        return dict(self.all_actions)

    @property
    def first_actions(self) -> dict[str, Action]:
        """The first completion of every agent that acted, which answers :attr:`first_messages`."""
        return dict(reversed(self.all_actions))

    @property
    def first_messages(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """The messages that every agent that acted saw first, in OpenAI's form."""
        seen: dict[str, tuple[dict[str, Any], ...]] = {}
        for agent in self.actions:
            messages = self.prompts[agent].observation.messages
            seen[agent] = tuple({"role": message.role, "content": message.content} for message in messages)
        if self.episode is not None:
            for number, call in enumerate(self.episode.calls):
                seen.setdefault(call.agent, self.episode.messages(number))
        return seen


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One path through a problem's tree. ``path`` holds the index of the joint action taken at each turn."""

    problem: Problem
    split: Split
    mode: Mode
    path: tuple[int, ...]
    steps: tuple[TrajectoryStep, ...]

    @property
    def texts(self) -> dict[str, str]:
        """The latest completion of every agent."""
        return {agent: action.text for step in self.steps for agent, action in step.latest_actions.items()}


# ---------------------------------------------------------------------------------------------- training, evaluation
@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with its advantage, ready for the update.

    ``returns``: mean return of the joint actions that contain the completion. ``advantage``: exactly 0 if all returns
    of its group are equal. ``group``: number, from 0, of its group of siblings in the batch. ``weight``: its weight in
    the loss, 1 in the first turn and less where a tree holds more completions of a turn. ``counts``: its share of the
    number of sequences by which the loss is divided; None: ``weight``.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logps: tuple[float, ...]
    returns: float
    advantage: float
    group: int
    policy_version: int
    weight: float = 1.0
    support: tuple[tuple[int, ...], ...] = ()
    counts: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The joint actions of one node, which preferences compare.

    ``returns``: one for each joint action. ``samples[agent]``: for each joint action, the number of its completion
    among the samples of the agent.
    """

    returns: tuple[float, ...]
    samples: dict[str, tuple[int, ...]]


ROUNDING = 1e-12
"""Largest size of a difference that is no difference, because rounding makes as much between equal fractions."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with a 95 % interval: over problems, or over seeds and problems (:mod:`magrpo.algo.stats`)."""

    mean: float
    low: float
    high: float

    @classmethod
    def without_width(cls, mean: float) -> Interval:
        """A mean that nothing tells the spread of."""
        return cls(mean, mean, mean)

    @property
    def has_width(self) -> bool:
        """Whether there is an interval to show: neither a single problem has one, nor several with equal values."""
        return self.high - self.low > ROUNDING

    @property
    def sign(self) -> Literal[-1, 0, 1]:
        """1 if the interval lies above 0, -1 if it lies below, 0 if it holds or touches 0, up to :data:`ROUNDING`."""
        if self.low > ROUNDING:
            return 1
        return -1 if self.high < -ROUNDING else 0


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Statistics of one completion that need no reward.

    ``cut_off``: whether it reached the limit of tokens. ``copied_frac``: share of its words that lie in a run of words
    of its prompt. ``repeated_frac``: share that lie in a run it has already written. ``prompt_words_frac``: share of
    its long words that its prompt has, too (:mod:`magrpo.algo.repetition`).
    """

    tokens: int
    cut_off: bool
    copied_frac: float
    repeated_frac: float
    prompt_words_frac: float

    @property
    def strayed_frac(self) -> float:
        """How far the answer has left its prompt: 0 while half of its long words are its prompt's, 1 if none is."""
        return max(0.0, 1.0 - 2.0 * self.prompt_words_frac)


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One evaluated joint trajectory. ``returns`` and ``parts`` have one entry for each turn taken, in reward units.

    ``texts`` and ``answers`` describe the latest completion of every agent; ``generated_tokens`` counts all turns.
    """

    task_id: str
    split: Split
    mode: Mode
    index: int
    returns: tuple[float, ...]
    parts: tuple[dict[str, float], ...]
    passed: tuple[bool | None, ...]
    texts: dict[str, str]
    answers: dict[str, AnswerStats]
    generated_tokens: int


HEADLINE = "test/sampled"
"""Key of the summary that compares runs: held-out problems, sampled."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation: ``summary[split/mode][quantity]`` as fractions of the maximum unless the name says otherwise."""

    policy_version: int
    rows: tuple[EvalRow, ...]
    summary: dict[str, dict[str, Interval]]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The time to answer one problem alone: seconds of sampling in all turns, and tokens sampled."""

    task_id: str
    seconds: float
    tokens: int
