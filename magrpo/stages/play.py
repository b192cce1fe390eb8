"""Play: whole trajectories, each on its own, from a problem to its last turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from magrpo.config import AgentConfig, RolloutConfig
from magrpo.interfaces import Engine, Env, Progress, Reward, Sandbox
from magrpo.stages.rollout import Node, Render, extend, has_ended, rollout
from magrpo.stages.score import Cache, ScoreStats, score
from magrpo.types import Mode, Split, Step, Trajectory


class Game(Protocol):
    """Who plays, where, and what it is worth: the configuration of a run, or a row of the table of baselines."""

    @property
    def agents(self) -> Sequence[AgentConfig]: ...

    @property
    def env(self) -> Env: ...

    @property
    def reward(self) -> Reward: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """What games are played with. ``engine`` holds the weights; ``stats`` takes up what the sandbox did."""

    engine: Engine
    sandbox: Sandbox
    render: Render
    cache: Cache
    progress: Progress | None = None
    stats: ScoreStats = field(default_factory=ScoreStats)


@dataclass(frozen=True, slots=True)
class Start:
    """A node without a past at which ``node.group_size`` trajectories begin, and what they count for."""

    split: Split
    mode: Mode
    node: Node


def play(
    arena: Arena,
    game: Game,
    starts: Sequence[Start],
    config: RolloutConfig,
    seed: int,
    *,
    stop_above: float | None = None,
    max_tries: int = 1,
) -> list[Trajectory]:
    """Every trajectory from ``starts`` to its end, all of them in one engine batch a turn.

    At each turn the agents that act answer once. A trajectory ends early where its reward exceeds ``stop_above``, in
    reward units, or where the sandbox failed on it: then its last turn is masked. Of ``max_tries`` tries each takes the
    turns of the environment and starts at the problem again, without a past; the steps are those of all tries taken.
    """
    aligned = config.model_copy(update={"joint_mode": "aligned", "crossed_pairs": None})
    roles = {agent.name: agent.role for agent in game.agents}
    num_turns = game.env.num_turns
    finished: list[Trajectory] = []
    going: list[tuple[Start, tuple[Step, ...]]] = [(start, ()) for start in starts]
    while going:
        turns_taken = len(going[0][1]) + 1
        groups = rollout(
            [start.node for start, _ in going],
            agents=game.agents,
            env=game.env,
            render=arena.render,
            engine=arena.engine,
            config=aligned,
            seed=seed,
            progress=arena.progress,
        )
        scored, stats = score(groups, roles=roles, reward=game.reward, sandbox=arena.sandbox, cache=arena.cache)
        arena.stats.add(stats)
        following: list[tuple[Start, tuple[Step, ...]]] = []
        for (start, before), group in zip(going, scored, strict=True):
            for index, joint_action in enumerate(group.turns):
                steps = (*before, Step.of(group, index))
                goes_on = not joint_action.masked and not has_ended(joint_action, stop_above)
                if goes_on and turns_taken < max_tries * num_turns:
                    node = extend(group, index, start.node.sampling, 1)
                    if turns_taken % num_turns == 0:
                        node = replace(node, history=())
                    following.append((Start(start.split, start.mode, node), steps))
                else:
                    path = (*group.path, index)
                    finished.append(Trajectory(group.problem, start.split, start.mode, path, steps))
        going = following
    return finished
