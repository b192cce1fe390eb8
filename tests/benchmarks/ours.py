"""Our side: the rollout, credit and update stages as a run calls them, on the transformers engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from magrpo.algo.advantages import group_advantages
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.engines.transformers import TransformersEngine
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.rewards.coding import SoloReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import rollout, root_nodes
from magrpo.types import (
    JointReward,
    Message,
    Observation,
    PastTurn,
    Problem,
    RolloutGroup,
    Sample,
    ScoredTurn,
    Turn,
)
from magrpo.updates.updater import Updater
from tests.benchmarks import workload
from tests.benchmarks.workload import GROUP_SIZE, NEW_TOKENS, Completions, Gradients, Meter
from tests.stages.crediting import credit_with

_CONFIG = RolloutConfig(
    problems_per_iteration=workload.NUM_PROMPTS, group_size=GROUP_SIZE, max_new_tokens=NEW_TOKENS, temperature=1.0
)
_MICRO_BATCH_TOKENS = {2048: 768, 32768: 1536}
"""By vocabulary: about the most that takes no more memory than the peer."""


class _Echo:
    """Every agent sees the problem's prompt and nothing else."""

    num_turns = 1

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def roles(self) -> tuple[str, ...]:
        return workload.AGENTS

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        return Observation((Message("user", problem.prompt),))


class Side:
    """Two agents, fully fine-tuned on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        self._agents = [AgentConfig(name=n, role=n, model=str(folder), weights="full") for n in workload.AGENTS]
        self._policy = Policy.open(self._agents, ModelConfig(device="cpu"), LoraConfig(), seed=0)
        self._team = Team(self._agents, _Echo(), SoloReward())
        self._backend = Backend(
            engine=TransformersEngine().open(EngineHost.of(self._policy)).serve(0, {}),
            sandbox=NoSandbox().open(),
            render=self._policy.lineup.render,
        )
        self._folder = folder
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._optim = OptimConfig(
            lr=workload.LEARNING_RATE, micro_batch_tokens=_MICRO_BATCH_TOKENS.get(vocab_size, 1024)
        )
        self._updater = self._open_updater(self._optim)

    def iteration(self, prompts: Sequence[str]) -> tuple[float, float]:
        """One iteration; seconds of its rollout, rewards included, and of its update, credit included."""
        meter = Meter()
        problems = [Problem(str(index), prompt) for index, prompt in enumerate(prompts)]
        meter.start()
        groups = rollout(root_nodes(problems, _CONFIG), self._team, self._backend, _CONFIG, seed=self._policy.version)
        scored = [_score(group) for group in groups]
        meter.lap()
        samples, _ = credit_with(scored, AlgoConfig(), workload.AGENTS)
        self._updater.update(samples)
        return meter.stop()

    def gradients(self, sampled: Sequence[Completions]) -> Gradients:
        """The gradients of one update on these completions, without their last token: the peer does not train it.

        A group is ``GROUP_SIZE`` neighbours.
        """
        groups = [sampled[i : i + GROUP_SIZE] for i in range(0, len(sampled), GROUP_SIZE)]
        advantages = [group_advantages([one.reward for one in group], "magrpo") for group in groups]
        samples = {
            agent: [
                _sample(one.prompt, one.texts[number], one.reward, advantage, index)
                for index, group in enumerate(groups)
                for one, advantage in zip(group, advantages[index], strict=True)
            ]
            for number, agent in enumerate(workload.AGENTS)
        }
        updater = self._open_updater(self._optim.model_copy(update={"max_grad_norm": 1e9}))  # the peer never clips
        with workload.gradients() as found:
            updater.update(samples)
        return {
            agent: {name: found[id(p)] for name, p in self._policy.parameters(agent).items()}
            for agent in workload.AGENTS
        }

    def _open_updater(self, optim: OptimConfig) -> Updater:
        return Updater(self._policy, AlgoConfig(), optim, _CONFIG, num_iterations=1000, dump=self._folder)


def _score(group: RolloutGroup[Turn]) -> RolloutGroup[ScoredTurn]:
    turns = tuple(
        ScoredTurn(turn.picks, JointReward(workload.reward(tuple(group.texts(turn).values())), {}), {})
        for turn in group.turns
    )
    return RolloutGroup(group.problem, group.path, group.history, group.prompts, group.actions, turns)


def _sample(prompt: str, text: str, reward: float, advantage: float, group: int) -> Sample:
    tokens = workload.token_ids(text)[:-1]
    return Sample(workload.token_ids(prompt), tokens, (0.0,) * len(tokens), reward, advantage, group, 0)
