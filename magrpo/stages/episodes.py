"""Episodes: plays the program of ``env.kind = "program"``, and turns each run into the records of the other stages.

An episode is a joint action without completions of its own: its calls hold them, and its texts are what the program
returned. A mistake of the program or of its agents is an outcome with a price. A failure is masked only if it has
nothing to do with the completions: leaving out other failures would train only on episodes in which all went well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from magrpo.checks.runners import run_executions
from magrpo.envs.program import AgentProgram
from magrpo.errors import PluginFailed, quote_value
from magrpo.gateway.player import PlayedEpisode, Services
from magrpo.gateway.sessions import EpisodeTask
from magrpo.interfaces import TakesReturned
from magrpo.stages.backend import Backend, Team, collect_reports
from magrpo.text import replace_surrogates
from magrpo.types import Episode, EpisodeStatus, Execution, ExecutionReport, RolloutGroup, Turn

PRICED_AS_FAILURE: frozenset[EpisodeStatus] = frozenset({"failed", "timed_out", "silent"})
_NUM_SHOWN = 3
"""Number of different messages of failed episodes that an error lists."""


def play_episodes(
    tasks: Sequence[Sequence[EpisodeTask]], team: Team, env: AgentProgram, backend: Backend
) -> list[RolloutGroup[Turn]]:
    """Play the episodes of each problem as one batch; returns a node for each problem.

    Raises PluginFailed if the program cannot be imported, or if too many episodes failed.
    """
    services = Services(
        agents={agent.role: agent.name for agent in team.agents},
        generate=partial(backend.generate, progress=None),
        run_programs=partial(_run_programs, backend),
        advance=backend.progress or (lambda _: None),
    )
    flat = [task for siblings in tasks for task in siblings]
    assert backend.player is not None, "a program needs a player"
    episodes = [_finish_episode(one, env, team) for one in backend.player.play(flat, services)]
    _check_failures(episodes, env)
    following = iter(episodes)
    groups = []
    for siblings in tasks:
        own = tuple(next(following) for _ in siblings)
        turns = tuple(Turn({}) for _ in siblings)
        groups.append(RolloutGroup(siblings[0].problem, (), (), {}, {}, turns, own))
    return groups


def _run_programs(backend: Backend, executions: list[Execution]) -> list[ExecutionReport]:
    """Run the programs that episodes request; a cached report is used if running the program again would repeat it."""
    reports, _ = collect_reports(executions, backend.cache, lambda new: run_executions(backend.sandbox, new, None))
    return [reports[execution] for execution in executions]


def _finish_episode(played: PlayedEpisode, env: AgentProgram, team: Team) -> Episode:
    """The episode with its texts, or with the reward that its program returned; failed if it returned neither."""
    if played.status != "finished":
        return Episode(played.calls, dict.fromkeys(env.writes, ""), played.status, played.message)
    result = replace_surrogates(played.result)
    try:
        if isinstance(team.reward, TakesReturned):
            roles = [agent.role for agent in team.agents]  # the program calls its agents by their roles
            return Episode(played.calls, {}, returned=team.reward.read_returned(result, roles))
        return Episode(played.calls, _read_texts(result, env.writes))
    except ValueError as error:
        return Episode(played.calls, dict.fromkeys(env.writes, ""), "failed", str(error))


def _read_texts(result: Any, roles: Sequence[str]) -> dict[str, str]:
    if isinstance(result, str) and len(roles) == 1:
        return {roles[0]: result}
    is_complete = isinstance(result, Mapping) and sorted(result) == sorted(roles)
    if not is_complete or not all(isinstance(text, str) for text in result.values()):
        raise ValueError(
            f"the program returned {quote_value(result)}; it must return a dict with a text for each of the roles "
            f"{', '.join(roles)} (env.writes)"
        )
    return {role: result[role] for role in roles}


def _check_failures(episodes: Sequence[Episode], env: AgentProgram) -> None:
    failed = [episode for episode in episodes if episode.status in PRICED_AS_FAILURE]
    if len(failed) <= env.max_failed_frac * len(episodes):
        return
    messages = Counter(f"{episode.status}: {episode.message}" for episode in failed).most_common(_NUM_SHOWN)
    listed = "\n".join(f"  {count} x {message}" for message, count in messages)
    raise PluginFailed(
        f"env.run = {env.run!r}: {len(failed)} of {len(episodes)} episodes failed, more than env.max_failed_frac = "
        f"{env.max_failed_frac:g}; the most frequent reasons:\n{listed}"
    )


def episode_metrics(groups: Sequence[RolloutGroup[Turn]]) -> dict[str, float]:
    """The metrics of ``rollout/`` that only programs have: how episodes ended, and their calls."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    ended = Counter(episode.status for episode in episodes)
    metrics = {f"rollout/{status}_frac": ended[status] / len(episodes) for status in ("failed", "timed_out", "silent")}
    calls = [call for episode in episodes for call in episode.calls]
    metrics["rollout/calls"] = len(calls) / len(episodes)
    metrics["rollout/overruled_frac"] = sum(bool(call.overruled) for call in calls) / max(len(calls), 1)
    return metrics
