"""MAGRPO on one page: one iteration, step by step, without a run directory and without Prefect.

    python -m magrpo.training.one_iteration rollout.problems_per_iteration=8

A run repeats these steps and commits the output of each: see :mod:`magrpo.training.loop`. Section numbers refer to the
paper, arXiv 2508.04652.
"""

import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.gateway.player import open_player
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.planning.place_check import check_place
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Backend, Team
from magrpo.stages.credit import CreditRules, credit
from magrpo.stages.prepare import draw_problems, prepare
from magrpo.stages.rollout import child_nodes, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import RolloutGroup, Sample, ScoredTurn
from magrpo.updates.updater import Updater

CONFIG = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"


class Iteration(NamedTuple):
    """The results of one iteration."""

    scored: list[RolloutGroup[ScoredTurn]]
    samples: dict[str, list[Sample]]
    metrics: dict[str, float]


def train_iteration(config: RunConfig, updater: Updater, backend: Backend, iteration: int) -> Iteration:
    """Compute one iteration of MAGRPO; afterwards ``updater.policy`` holds the new weights."""
    team = Team.of(config)

    # 1. Problems: every iteration draws some from the training split.
    splits = prepare(config.problems, config.rollout.problems_per_iteration)
    problems = draw_problems(splits["train"], iteration, config.rollout.problems_per_iteration, config.train.seed)

    # 2. Rollout and reward: at every node each agent samples a group of completions from its own prompt, not seeing
    #    those of others. Completions with the same index make a joint action, whose program runs in the sandbox; all
    #    agents earn the same joint reward. With several turns, joint actions open the nodes of the next turn.
    nodes = root_nodes(problems, config.rollout)
    scored: list[RolloutGroup[ScoredTurn]] = []
    for turn in range(config.env.num_turns):
        seed = derive_seed(config.train.seed, "rollout", iteration, turn)
        groups = rollout(nodes, team, backend, config.rollout, seed)
        level, _ = score(groups, team, backend.sandbox, backend.cache)
        scored += level
        nodes = child_nodes(level, config.rollout)

    # 3. Credit: the advantage of a completion is its joint return minus the mean of its group (section 4).
    names = [agent.name for agent in config.agents]
    samples, metrics = credit(scored, names, CreditRules.of(config))

    # 4. Update: each agent takes an optimizer step on -advantage * log-probability of its own completions.
    trained = {agent.name: samples[agent.name] for agent in config.agents if agent.trained}
    return Iteration(scored, samples, metrics | updater.update(trained))


def run_once(config: RunConfig) -> Iteration:
    """Open everything that an iteration needs, run the first one, and print the change.

    Raises ConfigError if the iteration has steps that this page leaves out.
    """
    left_out = {
        "critics": config.trains_critics,
        "MADPO": config.algo.loss == "madpo",
        "probes": config.rollout.probe_size is not None,
    }
    if found := [name for name, is_used in left_out.items() if is_used]:
        raise ConfigError(
            f"one_iteration.py leaves out {' and '.join(found)}: run `magrpo train` with this configuration"
        )
    check_place(config, Place())
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    before = {name: flat_weights(policy, name) for name in policy.agents}
    with (
        TemporaryDirectory() as folder,
        closing(config.engine.open(EngineHost.of(policy))) as engine,
        closing(config.sandbox.open()) as sandbox,
        open_player(config.env, policy.lineup) as player,
    ):
        served = engine.serve(0, policy.save(Path(folder)))
        updater = Updater.of(policy, config, dump=Path(folder))
        backend = Backend(engine=served, sandbox=sandbox, render=policy.lineup.render, player=player)
        result = train_iteration(config, updater, backend, iteration=1)
    print(f"mean joint reward {result.metrics['reward/joint']:.3f}")
    for name in policy.agents:
        change = float((flat_weights(policy, name) - before[name]).norm())
        equal = result.metrics[f"credit/{name}/frac_groups_equal"]
        print(f"{name}: groups without signal {equal:.0%}, its weights moved by {change:.4g}")
    return result


def flat_weights(policy: Policy, agent: str) -> Tensor:
    """Copy all trained weights of an agent into one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters(agent).values()])


if __name__ == "__main__":
    try:
        run_once(load_config(CONFIG, ["engine.kind=transformers", *sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
