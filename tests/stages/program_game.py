"""Games for programs, so small that their gradients are known exactly. Policies are tables of logits by prompt.

A game is a generator: it yields an agent and a prompt, is sent a token, and returns its reward with local rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magrpo.algo.episodes import Siblings
from magrpo.config.sections import AlgoConfig
from magrpo.types import Action, Call, Episode, JointReward, Problem, RolloutGroup, Sample, ScoredTurn
from tests.stages.crediting import credit_with

TOKENS = 3
ONE_HOT = np.eye(TOKENS)
GROUP_SIZE = 4
Step = tuple[str, tuple[int, ...]]
"""An agent and its prompt."""
Program = Generator[Step, int, tuple[float, Mapping[str, float]]]
Played = tuple[list[tuple[Step, int]], JointReward]
"""The steps of an episode with their tokens, and its reward."""


def choose_length() -> Program:
    """The first action decides whether there are 1, 2 or 8 calls; what is chosen in later ones does not matter."""
    first = yield "planner", (0,)
    num_calls, reward = ((1, 0.5), (2, 0.6), (8, 0.9))[first]
    for turn in range(1, num_calls):
        yield "planner", (1, turn)
    return reward, {}


def ask_coder() -> Program:
    """A planner asks a coder never, once or twice. Good answers, with token 2, pay, and more for the coder alone."""
    num_calls = yield "planner", (0,)
    answers = []
    for turn in range(num_calls):
        answers.append((yield "coder", (1, turn)))
    good = sum(answer == 2 for answer in answers)
    return (0.5, 0.2 + 0.5 * good, 0.1 + 0.6 * good)[num_calls], {"coder": 0.1 * sum(answers)}


@dataclass
class Policies:
    """Tables of probabilities by step. Logits are drawn at random, but equal at prompts that begin with ``uniform``."""

    program: Callable[[], Program]
    uniform: int = -1

    def __post_init__(self) -> None:
        rng = random.Random(3)
        self.tables: dict[Step, NDArray[np.float64]] = {}
        for step in sorted({step for steps, _ in self._list_tokens(()) for step, _ in steps}):
            spread = 0.0 if step[1][0] == self.uniform else 1.0
            logits = np.array([rng.uniform(-spread, spread) for _ in range(TOKENS)])
            self.tables[step] = np.exp(logits) / np.exp(logits).sum()
        self.rows = {step: row for row, step in enumerate(self.tables)}

    def _list_tokens(self, tokens: tuple[int, ...]) -> Iterator[Played]:
        """Every episode that begins with ``tokens``."""
        left = iter(tokens)
        steps, reward = self._play(lambda _: next(left, None))
        if reward is not None:
            yield steps, reward
            return
        for token in range(TOKENS):
            yield from self._list_tokens((*tokens, token))

    def _play(self, choose: Callable[[Step], int | None]) -> tuple[list[tuple[Step, int]], JointReward | None]:
        """Play until the program returns its reward, or ``choose`` gives no token."""
        program, steps = self.program(), []
        step = next(program)
        try:
            while (token := choose(step)) is not None:
                steps.append((step, token))
                step = program.send(token)
        except StopIteration as end:
            reward, local = end.value
            return steps, JointReward(reward, {}, dict(local))
        return steps, None

    def draw_episode(self, rng: random.Random) -> Played:
        steps, reward = self._play(lambda step: rng.choices(range(TOKENS), self.tables[step])[0])
        assert reward is not None
        return steps, reward

    def exact_gradient(self, agent: str) -> NDArray[np.float64]:
        """Of the expected return of ``agent`` with respect to its logits: ``(R, TOKENS)``, R all steps of the game."""
        gradient = np.zeros((len(self.tables), TOKENS))
        for steps, reward in self._list_tokens(()):
            probability = float(np.prod([self.tables[step][token] for step, token in steps]))
            value = reward.total + reward.local.get(agent, 0.0)
            for step, token in steps:
                if step[0] == agent:
                    gradient[self.rows[step]] += probability * value * self._score(step, token)
        return gradient

    def _score(self, step: Step, token: int) -> NDArray[np.float64]:
        """The gradient of the log-probability of a token."""
        return ONE_HOT[token] - self.tables[step]

    def draw_groups(self, num_draws: int, seed: int) -> list[RolloutGroup[ScoredTurn]]:
        """One problem for each draw; its number begins every prompt."""
        rng = random.Random(seed)
        return [
            make_group(str(draw), [self.draw_episode(rng) for _ in range(GROUP_SIZE)], (draw,))
            for draw in range(num_draws)
        ]

    def gradients(
        self,
        groups: Sequence[RolloutGroup[ScoredTurn]],
        agent: str,
        weigh: Callable[[Sample, Sequence[Sample]], float],
        algo: AlgoConfig,
        siblings: Siblings = "agent",
    ) -> NDArray[np.float64]:
        """``(num_draws, R * TOKENS)``: the gradient of each draw, with each sample's share as ``weigh`` says.

        ``weigh`` is given a sample and all samples of its draw.
        """
        samples, _ = credit_with(groups, algo.model_copy(update={"siblings": siblings}), [agent])
        by_draw: dict[int, list[Sample]] = {}
        for sample in samples[agent]:
            by_draw.setdefault(sample.prompt_ids[0], []).append(sample)
        found = np.zeros((len(groups), len(self.tables), TOKENS))
        for draw, members in by_draw.items():
            for sample in members:
                step = agent, sample.prompt_ids[1:]
                share = weigh(sample, members) * sample.advantage
                found[draw, self.rows[step]] += share * self._score(step, sample.completion_ids[0])
        return found.reshape(len(groups), -1)


def make_group(
    task_id: str, played: Sequence[Played], prefix: tuple[int, ...] = (), masked: Sequence[int] = ()
) -> RolloutGroup[ScoredTurn]:
    """A scored problem with its episodes. ``prefix`` begins all prompts; ``masked``: the masked episodes."""
    episodes, turns = [], []
    for index, (steps, reward) in enumerate(played):
        calls = tuple(
            Call(agent, -1, (*prefix, *prompt), (), Action(agent, "", (token,), (-0.5,), "stop", 0))
            for (agent, prompt), token in steps
        )
        episodes.append(Episode(calls, {}))
        turns.append(ScoredTurn({}, reward, {}, masked=index in masked))
    return RolloutGroup(Problem(task_id, ""), (), (), {}, {}, tuple(turns), tuple(episodes))
