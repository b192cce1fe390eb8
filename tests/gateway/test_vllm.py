"""256 programs at once on vLLM, one in twenty of which misbehaves: none is lost, and each has its price."""

import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.sections import RolloutConfig
from magrpo.engines.vllm import VllmEngine
from magrpo.envs.program import AgentProgram
from magrpo.gateway.player import open_player
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.process.children import list_family
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import Problem
from tests.gateway.programs import plan_fault
from tests.plugins import Reward, Sandbox
from tests.processes import find_running
from tests.tiny import tiny_base, tiny_config

NUM_EPISODES = 256
ENDS = {"crash": "failed", "hang": "timed_out"}
"""The status of an episode with a fault; with the others it finishes."""
NUM_CALLS = {"crash": 0, "hang": 0, "drop": 3, "retry": 3}
"""Completions of an episode with a fault; without one, or after a malformed request, two."""


@pytest.mark.slow
@pytest.mark.vllm
def test_no_episode_is_lost(tmp_path: Path) -> None:
    base = str(tiny_base(tmp_path / "base", tiny_config(max_length=256)))
    agents = [AgentConfig(name=name, model=base) for name in ("helper", "main")]
    policy = Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)
    env = AgentProgram(
        run="tests.gateway.programs:misbehave",
        writes=("helper", "main"),
        time_limit_s=120.0,
        failure_reward=-1.0,
    )
    config = RolloutConfig(group_size=1, max_new_tokens=8)
    problems = [Problem(f"task/{number}", "") for number in range(NUM_EPISODES)]
    team = Team(agents, env, Reward(kind="reward"))
    with (
        closing(VllmEngine().open(EngineHost.of(policy))) as engine,
        open_player(env, policy.lineup) as player,
    ):
        served = engine.serve(0, policy.save(tmp_path / "weights"))
        backend = Backend(
            engine=served, sandbox=Sandbox(kind="sandbox").open(), render=policy.lineup.render, player=player
        )
        groups = rollout(root_nodes(problems, config), team, backend, config, seed=0)
        scored, _ = score(groups, team, backend.sandbox, {})
        assert player is not None
        player.close()
        left = find_running(list_family(os.getpid()), "magrpo.gateway.forkserver")
    faults = [plan_fault(number) for number in range(NUM_EPISODES)]
    episodes = [group.episodes[0] for group in groups]
    assert [episode.status for episode in episodes] == [ENDS.get(fault, "finished") for fault in faults]
    assert [len(episode.calls) for episode in episodes] == [NUM_CALLS.get(fault, 2) for fault in faults]
    for group, episode in zip(scored, episodes, strict=True):
        total = group.turns[0].reward.total
        assert (total == -1.0) == (episode.status != "finished")
        assert all(call.action.token_ids for call in episode.calls)
    assert Counter(episode.status for episode in episodes) == {"finished": 250, "failed": 3, "timed_out": 3}
    assert left == []
