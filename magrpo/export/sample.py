"""A real sample for the model card: a held-out problem, the prompts of all agents, their answers and the reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magrpo.algo.answers import measure_step
from magrpo.export.team import TrainedTeam
from magrpo.reports.health import describe_answer
from magrpo.rewards.common import choose_program, merge_hidden_report
from magrpo.run.files import TRAJECTORIES
from magrpo.run.store import read_records
from magrpo.types import JointReward, Problem, Trajectory


@dataclass(frozen=True, slots=True)
class ModelCardSample:
    """The first answer of every agent to one problem, greedy, from the run's last evaluation; keyed by agent.

    An agent that a program asked several times is shown with its first answer.
    """

    problem: Problem
    messages: Mapping[str, Sequence[Mapping[str, Any]]]
    """The prompts as the environment, or the program, made them."""
    answers: Mapping[str, str]
    remarks: Mapping[str, str]
    """Remarks on answers that were cut off or copied from their prompt; other agents have none."""
    program: str
    """The program that the reward made of the answers; empty if there is none."""
    tests: tuple[int, int] | None
    """Number of tests that the program passed, and number of tests; None without a program."""
    reward: JointReward
    num_problems: int
    """Number of held-out problems that the sample was chosen from."""


def choose_sample(team: TrainedTeam) -> ModelCardSample | None:
    """Choose the sample with the highest return, and among those the shortest prompt; None if all are masked."""
    trajectories = [
        trajectory
        for trajectory in read_records(team.evaluation / TRAJECTORIES, Trajectory)
        if (trajectory.split, trajectory.mode) == ("test", "greedy") and not trajectory.steps[-1].turn.masked
    ]
    if not trajectories:
        return None

    def order(one: Trajectory) -> tuple[float, int, str]:
        return -_first_round(one)[1].total, len(one.problem.prompt), one.problem.task_id

    best = min(trajectories, key=order)
    num_steps, reward = _first_round(best)
    steps = best.steps[:num_steps]
    messages = {agent: seen for step in reversed(steps) for agent, seen in step.first_messages.items()}
    answers = {agent: action.text for step in reversed(steps) for agent, action in step.first_actions.items()}
    agents = [agent for agent in team.config.agents if agent.name in answers]
    remarks = {
        agent: describe_answer(stats, is_code=bool(best.problem.entry_point))
        for step in steps
        for agent, stats in measure_step(step, best.problem.prompt).items()
        if step.first_actions[agent] == step.latest_actions[agent]
    }
    texts = {agent.role: answers[agent.name] for agent in agents}
    if steps[-1].episode is not None:
        texts = steps[-1].episode.texts
    executions = team.config.reward.executions(best.problem, texts, {})
    reports = steps[-1].turn.reports
    chosen = choose_program(executions, reports)
    report = None if chosen is None else merge_hidden_report(reports, chosen)
    return ModelCardSample(
        problem=best.problem,
        messages={agent.name: messages[agent.name] for agent in agents},
        answers={agent.name: answers[agent.name] for agent in agents},
        remarks={agent: remark for agent, remark in remarks.items() if remark},
        program="" if chosen is None else executions[chosen].source,
        tests=None if report is None else (report.tests_passed, report.tests_total),
        reward=reward,
        num_problems=len(trajectories),
    )


def _first_round(trajectory: Trajectory) -> tuple[int, JointReward]:
    """The number of turns until every agent has answered once, and the reward of the last of them."""
    everybody = trajectory.texts.keys()
    seen: set[str] = set()
    for number, step in enumerate(trajectory.steps, start=1):
        seen |= step.latest_actions.keys()
        if seen == everybody:
            return number, step.turn.reward
    raise AssertionError("the last turn has seen every agent that acts")
