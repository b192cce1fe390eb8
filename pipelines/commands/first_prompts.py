"""The problems of a planned run, and one prompt of each agent as its model will read it."""

from collections.abc import Iterator
from dataclasses import dataclass

from magrpo.config.run import RunConfig
from magrpo.envs.program import AgentProgram
from magrpo.files import hub
from magrpo.model.lineup import Lineup
from magrpo.progress.activity import show_activity
from magrpo.stages.backend import Splits, Team
from magrpo.stages.prepare import Room, prepare
from magrpo.types import Problem
from pipelines.commands.plan_lines import format_line

_MAX_CHARS = 1200
"""Length in characters up to which a prompt is shown whole."""
_MAX_COUNTED = 1000
"""Number of prompts of each agent whose tokens are counted, taking the longest texts."""


@dataclass(frozen=True, slots=True)
class PlannedProblems:
    """The problems of a planned run, and the length of their longest prompt."""

    splits: Splits
    longest_prompt: int
    """Tokens of the longest prompt; 0 if a program writes the prompts."""
    counts_all: bool
    """Whether the tokens of every prompt were counted."""


def read_planned_problems(config: RunConfig, lineup: Lineup, committed: Splits | None) -> PlannedProblems | str:
    """Read the problems; return a line that says why they cannot be read if they are on the hub only.

    ``committed``: the problems of a run that has loaded them. Raises ConfigError where the run would.
    """
    try:
        with show_activity("reading the problems"):
            splits = committed or _load_problems(config, lineup)
            return _count_longest(config, lineup, splits)
    except hub.NotCached as error:
        obstacle = hub.find_hub_obstacle()
        outlook = f", and {obstacle}: the run would be refused" if obstacle else "; the run will download it"
        return format_line("problems", f"could not be read: {error}{outlook}")


def describe_problems(config: RunConfig, lineup: Lineup, problems: PlannedProblems | str) -> Iterator[str]:
    """Show the size of each split, the longest prompt, and the first prompt of each agent."""
    if isinstance(problems, str):
        yield problems
        yield from _describe_templates(lineup)
        return
    splits = problems.splits
    yield format_line("problems", ", ".join(f"{len(members)} {split}" for split, members in splits.items()))
    if isinstance(config.env, AgentProgram):
        yield format_line("program", f"{config.env.run}, which writes the prompts; not run here")
        yield from _describe_templates(lineup)
        return
    remark = "" if problems.counts_all else f", of the {_MAX_COUNTED:,} with the longest texts"
    yield format_line("", f"the longest prompt has {problems.longest_prompt:,} tokens{remark}")
    yield from _describe_templates(lineup)
    if not config.baselines.rows:
        for agent in config.agents:
            yield _show_prompt(Team.of(config), lineup, agent.name, splits["train"][0])


def _describe_templates(lineup: Lineup) -> Iterator[str]:
    if unused := lineup.find_unused_templates():
        yield format_line("warning", unused)


def _load_problems(config: RunConfig, lineup: Lineup) -> Splits:
    with hub.read_cache_only():
        room = Room.of(config, lineup)
        return prepare(config.problems, config.rollout.problems_per_iteration, room, config.rollout.leave_out_long)


def _count_longest(config: RunConfig, lineup: Lineup, splits: Splits) -> PlannedProblems:
    """Count the tokens of the longest prompt, of the :data:`_MAX_COUNTED` with the longest texts for each agent."""
    problems = [problem for members in splits.values() for problem in members]
    longest, counts_all = 0, True
    for team, _ in Room.of(config, lineup).teams:
        acting = team.env.acting(0)
        for agent in (agent for agent in team.agents if agent.role in acting):
            prompts = [team.env.observe(problem, agent.role, (), agent.name) for problem in problems]
            prompts.sort(key=lambda prompt: sum(len(message.content) for message in prompt.messages), reverse=True)
            counts_all = counts_all and len(prompts) <= _MAX_COUNTED
            lengths = [len(lineup.render(agent.name, prompt)) for prompt in prompts[:_MAX_COUNTED]]
            longest = max(longest, *lengths)
    return PlannedProblems(splits, longest, counts_all)


def _show_prompt(team: Team, lineup: Lineup, agent: str, problem: Problem) -> str:
    """Show an agent's prompt for a problem, special tokens included; a long one without its middle."""
    role = team.roles[agent]
    if role not in team.env.acting(0):
        return format_line("prompt", f"{agent} acts in a later turn and reads the earlier answers")
    token_ids = lineup.render(agent, team.env.observe(problem, role, (), agent))
    text = str(lineup.tokenizer(agent).decode(list(token_ids), skip_special_tokens=False))
    quoted = [f"  | {line}".rstrip() for line in shorten_middle(text).split("\n")]
    title = f"of {agent}, for {problem.task_id}: {len(token_ids):,} tokens"
    return format_line("prompt", "\n".join([title, *quoted]))


def shorten_middle(text: str) -> str:
    left_out = len(text) - _MAX_CHARS
    if left_out <= 0:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} ... ({left_out:,} characters omitted) ... {text[-half:]}"
