"""Penalty: subtracts the costs of faulty answers from the joint reward, after the reward plug-in has priced it."""

from dataclasses import replace
from statistics import fmean

from magrpo.algo.answers import measure_calls, measure_completions
from magrpo.config.sections import PenaltyConfig
from magrpo.interfaces import Reward
from magrpo.stages.backend import Team
from magrpo.types import PENALTY, PENDING, Episode, JointReward, RolloutGroup, ScoredTurn


def subtract_penalties(group: RolloutGroup[ScoredTurn], team: Team) -> RolloutGroup[ScoredTurn]:
    """Subtract from every joint action of a node the costs of the texts that its reward was computed from.

    These are the latest texts of all agents. An answer of an earlier turn thus costs as long as its text is rewarded,
    also if the reward of its own turn was pending. Masked and pending turns stay as they are. An episode of a program
    costs what the completions of each agent cost on average; one that failed has its price already.
    """
    penalty = team.penalty
    if not penalty.is_on:
        return group
    if group.episodes:
        turns = [
            _charge_episode(turn, episode, group.problem.prompt, team)
            for turn, episode in zip(group.turns, group.episodes, strict=True)
        ]
        return group.with_scores(tuple(turns))
    costs = {
        agent: [penalty.price_answer(stats) for stats in measured]
        for agent, measured in measure_completions(group).items()
    }
    earlier = _price_history(group, penalty)

    def charge_turn(turn: ScoredTurn) -> ScoredTurn:
        if turn.masked or turn.reward == PENDING:
            return turn
        latest = earlier | {agent: costs[agent][index] for agent, index in turn.picks.items()}
        return replace(turn, reward=_subtract_cost(turn.reward, sum(latest.values()), team.reward))

    return group.with_scores(tuple(map(charge_turn, group.turns)))


def _charge_episode(turn: ScoredTurn, episode: Episode, task: str, team: Team) -> ScoredTurn:
    if turn.masked or episode.status != "finished":
        return turn
    by_agent = measure_calls(episode, task)
    costs = [fmean(map(team.penalty.price_answer, measured)) for measured in by_agent.values()]
    return replace(turn, reward=_subtract_cost(turn.reward, sum(costs), team.reward))


def _price_history(group: RolloutGroup[ScoredTurn], penalty: PenaltyConfig) -> dict[str, float]:
    """The cost of the latest earlier answer of every agent."""
    return {agent: penalty.price_answer(stats) for past in group.history for agent, stats in past.answers.items()}


def _subtract_cost(joint: JointReward, cost: float, reward: Reward) -> JointReward:
    """Subtract ``cost``, a share of the reward's maximum, from the total, and record it as a part."""
    # Fractions are linear in the total, so this is the difference between the largest total and one worth nothing.
    whole = 1 / (float(reward.fraction(1.0)) - float(reward.fraction(0.0)))
    parts = joint.parts | {PENALTY: 0.0 - cost * sum(reward.maxima.values())}
    return replace(joint, total=joint.total - cost * whole, parts=parts)
