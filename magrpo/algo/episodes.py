"""Credit for the calls of programs: every call of an agent is a completion with the return of its episode.

The program, its random numbers and other services are the environment; a call is an action in the state that its exact
prompt is. So the gradient of an agent is the expectation, over episodes, of the sum over the agent's calls of
``(R - b) grad log pi(completion | prompt)``, and the loss is divided by the number of episodes. Dividing by the number
of calls would not be the gradient of the expected return (docs/algorithm.md, "Programs").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Literal

from magrpo.algo.advantages import EstimatorName, group_advantages
from magrpo.algo.stats import mean_or_zero
from magrpo.types import Normalize, RolloutGroup, Sample, ScoredTurn

Siblings = Literal["agent", "agent_turn"]


@dataclass(frozen=True, slots=True)
class _Acted:
    """A valid episode with the numbers of the calls of one agent, and the agent's return."""

    group: RolloutGroup[ScoredTurn]
    index: int
    calls: Sequence[int]
    value: float


def credit_episodes(
    groups: Sequence[RolloutGroup[ScoredTurn]],
    estimators: Mapping[str, EstimatorName],
    normalize: Normalize,
    siblings: Siblings,
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """The samples of every agent, one for each of its calls, and the metrics of ``credit/``.

    ``estimators``: the estimator of each agent.

    The returns of a problem's other episodes are the baseline, also those of episodes in which the agent was not asked.
    With ``siblings = "agent_turn"``, the baseline of an agent's t-th call is made of the episodes that have a t-th call
    of the agent, unless there is only one. Masked episodes are ignored.
    """
    samples: dict[str, list[Sample]] = {}
    metrics: dict[str, float] = {}
    all_equal: list[bool] = []
    for agent, estimator in estimators.items():
        by_problem = [list(_list_valid(group, agent)) for group in groups]
        samples[agent], groups_equal = _credit_agent(by_problem, estimator, normalize, siblings)
        valid = [episode for episodes in by_problem for episode in episodes]
        all_equal += groups_equal
        metrics |= {
            f"credit/{agent}/frac_groups_equal": mean_or_zero(groups_equal),
            f"credit/{agent}/advantage_std": pstdev([sample.advantage for sample in samples[agent]] or [0.0]),
            f"credit/{agent}/calls": mean_or_zero([len(episode.calls) for episode in valid]),
            f"credit/{agent}/acting_frac": mean_or_zero([bool(episode.calls) for episode in valid]),
        }
    metrics["reward/frac_groups_equal"] = mean_or_zero(all_equal)
    return samples, metrics


def _list_valid(group: RolloutGroup[ScoredTurn], agent: str) -> Iterator[_Acted]:
    for index, (turn, episode) in enumerate(zip(group.turns, group.episodes, strict=True)):
        if not turn.masked:
            calls = [number for number, call in enumerate(episode.calls) if call.agent == agent]
            yield _Acted(group, index, calls, turn.reward.earned_by(agent))


def _credit_agent(
    by_problem: Sequence[Sequence[_Acted]], estimator: EstimatorName, normalize: Normalize, siblings: Siblings
) -> tuple[list[Sample], list[bool]]:
    """The agent's samples, and for each problem with a valid episode whether all advantages of its episodes are 0."""
    num_valid = sum(map(len, by_problem))
    num_acting = sum(bool(episode.calls) for episodes in by_problem for episode in episodes)
    samples: list[Sample] = []
    groups_equal: list[bool] = []
    num_groups = 0
    for episodes in by_problem:
        advantages = group_advantages([episode.value for episode in episodes], estimator, normalize)
        if episodes:
            groups_equal.append(not any(advantages))
        most_calls = max((len(episode.calls) for episode in episodes), default=0)
        for turn in range(most_calls):
            acted = [index for index, episode in enumerate(episodes) if len(episode.calls) > turn]
            compared = {index: advantages[index] for index in acted}
            if siblings == "agent_turn" and len(acted) > 1:
                values = [episodes[index].value for index in acted]
                compared = dict(zip(acted, group_advantages(values, estimator, normalize), strict=True))
            for index, advantage in compared.items():
                episode = episodes[index]
                # The sum over all samples is the number of valid episodes: the divisor of the loss.
                counts = num_valid / (num_acting * len(episode.calls))
                samples.append(_build_sample(episode, turn, advantage, num_groups, counts))
            if siblings == "agent_turn":
                num_groups += 1
        if siblings == "agent":
            num_groups += 1
    return samples, groups_equal


def _build_sample(acted: _Acted, turn: int, advantage: float, group: int, counts: float) -> Sample:
    episode, number = acted.group.episodes[acted.index], acted.calls[turn]
    action = episode.calls[number].action
    return Sample(
        prompt_ids=episode.prompt_ids(number),
        completion_ids=action.token_ids,
        sampling_logps=action.sampling_logps,
        returns=acted.value,
        advantage=advantage,
        group=group,
        policy_version=action.policy_version,
        support=action.support,
        counts=counts,
    )
