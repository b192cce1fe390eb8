"""A game so small that its gradient is known exactly, played through the real rollout and credit.

Two agents choose one of three tokens each turn. Policies are tables: the logits of an agent after a history. All that
was chosen before is seen by both, so every history has a policy of its own.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magrpo.config.agents import AgentConfig
from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.interfaces import Progress
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.credit import JOINT, CreditRules, Critique, credit
from magrpo.stages.rollout import child_nodes, rollout, root_nodes
from magrpo.types import (
    PENDING,
    Action,
    JointReward,
    Message,
    Observation,
    PastTurn,
    Problem,
    Request,
    RolloutGroup,
    ScoredTurn,
    Turn,
)
from tests.fakes import PassReward

TOKENS = 3
AGENTS = [AgentConfig(name=name, role=name, model="table") for name in ("ada", "bob")]
History = tuple[int, ...]
"""The tokens chosen so far, in the order in which they were: ada's before bob's where both act."""


class Game:
    """Policies, rewards and the exact value of ``num_turns`` turns; ``sequential``: ada acts in the first, bob then."""

    def __init__(self, num_turns: int, *, sequential: bool = False, threshold: float | None = None) -> None:
        self.num_turns, self.sequential, self.threshold = num_turns, sequential, threshold
        rng = random.Random(7)
        self.histories = [h for turn in range(num_turns) for h in self._histories(turn)]
        self.row: dict[tuple[str, History], int] = {}
        """The row of ``logits`` for each agent and each history after which it acts."""
        for history in self.histories:
            for agent in AGENTS:
                if self._acts(agent.role, history):
                    self.row[agent.name, history] = len(self.row)
        self.logits = torch.tensor([[rng.uniform(-1, 1) for _ in range(TOKENS)] for _ in self.row], dtype=torch.float64)
        self.probabilities = self.logits.softmax(-1).numpy()
        ends = [h for turn in range(num_turns) for h in self._histories(turn + 1)]
        self.rewards = {h: rng.uniform(0, 4) for h in ends if not (sequential and len(h) < 2)}

    def roles(self) -> tuple[str, ...]:
        return ("ada", "bob")

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn],) if self.sequential else self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        chosen = "".join(text for turn in history for text in turn.texts.values())
        return Observation((Message("user", f"{problem.task_id}|{chosen}"),))

    def score(self, group: RolloutGroup[Turn]) -> RolloutGroup[ScoredTurn]:
        before = tuple(int(text) for turn in group.history for text in turn.texts.values())
        scored = []
        for turn in group.turns:
            reward = self.rewards.get((*before, *map(int, group.texts(turn).values())))
            scored.append(ScoredTurn(turn.picks, PENDING if reward is None else JointReward(reward, {}), {}))
        return replace(group, turns=tuple(scored))  # type: ignore[return-value]

    def exact_gradient(self, gamma: float) -> NDArray[np.float64]:
        """Of ``E[sum_t gamma^t r_t]`` with respect to all logits, flat; an ended episode earns its reward on and on."""
        logits = self.logits.clone().requires_grad_()
        logps = logits.log_softmax(-1)
        (gradient,) = torch.autograd.grad(self._value((), 0, logps, gamma), logits)
        return gradient.flatten().numpy()

    def exact_values(self, gamma: float) -> dict[History, float]:
        """The expected return from every history on."""
        logps = self.logits.log_softmax(-1)
        size = 1 if self.sequential else 2
        return {h: float(self._value(h, len(h) // size, logps, gamma)) for h in self.histories}

    def _value(self, history: History, turn: int, logps: Tensor, gamma: float) -> Tensor:
        value = torch.zeros((), dtype=torch.float64)
        acting = [a.name for a in AGENTS if self._acts(a.role, history)]
        for choice in itertools.product(range(TOKENS), repeat=len(acting)):
            after = (*history, *choice)
            logp = sum(logps[self.row[name, history], token] for name, token in zip(acting, choice, strict=True))
            reward = self.rewards.get(after)
            left = self.num_turns - 1 - turn
            if left and reward is not None and self.threshold is not None and reward > self.threshold:
                worth = torch.tensor(reward * sum(gamma**t for t in range(left + 1)))
            elif left:
                worth = (reward or 0.0) + gamma * self._value(after, turn + 1, logps, gamma)
            else:
                worth = torch.tensor(reward)
            value = value + torch.as_tensor(logp).exp() * worth
        return value

    def _acts(self, role: str, history: History) -> bool:
        return role in self.acting(len(history) if self.sequential else len(history) // 2)

    def _histories(self, turn: int) -> list[History]:
        return list(itertools.product(range(TOKENS), repeat=turn if self.sequential else 2 * turn))


class TableEngine:
    """Draws from the tables of a game; a request's seed is its uniform number."""

    def __init__(self, game: Game) -> None:
        self.cumulative = game.probabilities.cumsum(-1).tolist()
        self.row = game.row

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        actions = []
        for request in requests:
            first, second, _ = self.cumulative[self.row[request.agent, history_of(request.prompt_ids)]]
            uniform = request.seed / 2**63
            token = bisect_right((first, second), uniform)
            actions.append(Action(request.agent, str(token), (token,), (0.0,), "stop", 0))
        return actions

    def close(self) -> None: ...


def render(agent: str, observation: Observation) -> tuple[int, ...]:
    """The number of the draw, and the tokens chosen before."""
    draw, _, chosen = observation.messages[0].content.partition("|")
    return (int(draw), *map(int, chosen))


def history_of(prompt_ids: Sequence[int]) -> History:
    return tuple(prompt_ids[1:])


def gradients(
    game: Game,
    config: RolloutConfig,
    algos: Sequence[AlgoConfig],
    num_draws: int,
    seed: int = 0,
    critics: Mapping[AlgoConfig, tuple[Mapping[History, float], float]] = MappingProxyType({}),
) -> list[NDArray[np.float64]]:
    """``(num_draws, P)`` for each of ``algos``, from the same draws: the gradient that the loss takes from its samples.

    A draw is a problem of its own. Its gradient is the sum over samples of weight, advantage and gradient of the
    log-probability, over ``G``: the sum of the weights is ``G`` for each turn in which the agent acts. ``critics``: the
    value of every history, and lambda, for algorithms with a critic.
    """
    found = [np.zeros((num_draws, len(game.row), TOKENS)) for _ in algos]
    for start in range(0, num_draws, 500):
        groups = _played(game, config, range(start, min(start + 500, num_draws)), seed)
        for gradient, algo in zip(found, algos, strict=True):
            names = [agent.name for agent in AGENTS]
            values, gae_lambda = critics.get(algo, ({}, 1.0))
            said = {
                (group.problem.task_id, group.path): dict.fromkeys((JOINT, *names), values[_seen(group)])
                for group in groups
                if values
            }
            rules = CreditRules(algo, {}, config, game.num_turns, Critique(said, gae_lambda))
            samples, _ = credit(groups, names, rules)
            for name, members in samples.items():
                for sample in members:
                    row = game.row[name, history_of(sample.prompt_ids)]
                    step = sample.weight * sample.advantage / config.group_size
                    gradient[sample.prompt_ids[0], row] -= step * game.probabilities[row]
                    gradient[sample.prompt_ids[0], row, sample.completion_ids[0]] += step
    return [gradient.reshape(num_draws, -1) for gradient in found]


def _seen(group: RolloutGroup[ScoredTurn]) -> History:
    prompt = next(iter(group.prompts.values()))
    return history_of(prompt.token_ids)


def _played(game: Game, config: RolloutConfig, draws: Sequence[int], seed: int) -> list[RolloutGroup[ScoredTurn]]:
    """All turns of one problem for each draw."""
    nodes = root_nodes([Problem(str(draw), "") for draw in draws], config)
    groups: list[RolloutGroup[ScoredTurn]] = []
    team = Team(AGENTS, game, PassReward())
    backend = Backend(engine=TableEngine(game), sandbox=NoSandbox().open(), render=render)
    for turn in range(game.num_turns):
        level = rollout(nodes, team, backend, config, seed + turn)
        scored = [game.score(group) for group in level]
        groups += scored
        nodes = child_nodes(scored, config)
    return groups
