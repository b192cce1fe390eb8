"""``magrpo ask``: gives trained agents a problem, and compares their answer with their base models' answer."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from magrpo.asking.answers import Answer, AskedAgents, open_asked_agents
from magrpo.asking.problems import TASK_ID, explain_words, find_problem, load_asked_problems, write_problem
from magrpo.asking.teams import AskedTeam, find_asked_team
from magrpo.assets import locate_model
from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import ReadsSentences
from magrpo.process.signals import find_exit_code
from magrpo.progress.activity import LOADING, show_activity
from magrpo.stages.backend import Team
from magrpo.types import Problem
from pipelines.commands.answer_view import AnswerView, answer_as_json

TRAINED, BASE = "trained", "base"
"""The teams that answer, as named in columns of the table and in keys of the JSON."""


@dataclass(frozen=True, slots=True)
class Question:
    """A problem, as text or as an id in the run, and how to answer it; by default the first held-out problem."""

    text: str | None = None
    problem: str | None = None
    """Id of a problem of the run, or a part of it."""
    tests: Sequence[str] = ()
    seed: int | None = None
    """Seed of a sampled answer; None: decode greedily."""
    with_base: bool = True
    """Whether the base models answer, too."""
    as_json: bool = False
    prompts: bool = False
    """Whether to show the prompt of each agent."""


def ask_agents(run: str, root: Path, checkpoint: int | None, overrides: Sequence[str], question: Question) -> int:
    """Let the team called ``run`` answer; return the exit code. Raises ConfigError if team or question is unusable."""
    asked = find_asked_team(run, root, checkpoint, overrides)
    problem = _choose_problem(asked, question)
    try:
        with _open_agents(asked, question.with_base) as agents:
            if question.as_json:
                print(json.dumps(_answer_as_json(asked, agents, problem, question), indent=2))
            else:
                _show_answers(asked, agents, problem, question)
    except KeyboardInterrupt as error:
        return find_exit_code(error)
    return 0


def _choose_problem(asked: AskedTeam, question: Question) -> Problem:
    text = question.text
    if question.problem is not None:
        if text is not None or question.tests:
            raise ConfigError("--problem names a problem of the run: leave out PROBLEM and --test")
        return find_problem(load_asked_problems(asked), question.problem)
    if text is None and sys.stdin is not None and not sys.stdin.isatty():  # None if the shell closed it with <&-
        try:
            given = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not text in {error.encoding}; convert it, as iconv does") from None
        text = given if given.strip() else None  # blank where a script has no standard input, as in cron
    if text is None:
        if question.tests:
            raise ConfigError("--test needs a problem: PROBLEM, or text on standard input")
        return next(iter(load_asked_problems(asked).values()))
    override = re.fullmatch(r"(\w+)(\.\w+)+=\S*", text.strip())
    if override and override[1] in type(asked.config).model_fields:
        raise ConfigError(f"{override[0]} is a value of the configuration: write --set {override[0]}")
    return write_problem(text, question.tests, asked.config.reward, asked.config.problems)


@contextmanager
def _open_agents(asked: AskedTeam, with_base: bool) -> Iterator[AskedAgents]:
    """Load the agents, showing on standard error what is being loaded."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print("loading libraries, agents and sandbox", soft_wrap=True)
    with show_activity(LOADING["libraries"], console):
        import magrpo.model.policy  # torch and transformers, under the spinner  # noqa: F401
    bases = ", ".join(dict.fromkeys(agent.model for agent in asked.config.agents))
    with ExitStack() as opened:
        with show_activity(f"loading agents on {bases}, starting the sandbox", console):
            agents = opened.enter_context(open_asked_agents(asked, with_untrained=with_base))
        yield agents


def _list_teams(asked: AskedTeam, agents: AskedAgents) -> Mapping[str, Team]:
    """Return the teams that answer; a run before its first update has only its base models."""
    teams = {TRAINED if asked.weights else BASE: agents.trained}
    if agents.untrained is not None:
        teams[BASE] = agents.untrained
    return teams


def _show_answers(asked: AskedTeam, agents: AskedAgents, problem: Problem, question: Question) -> None:
    """Print each team's answer, turn by turn, then compare them."""
    roles = asked.config.env.roles()
    authors = [agent.name for agent in asked.config.agents if agent.role in roles[-1:]]
    author = authors[0] if authors else asked.config.agents[-1].name  # a program may give its roles to any agents
    view = AnswerView(Console(highlight=False), asked.config.reward, author)
    view.show_problem(problem)
    if remark := describe_knowledge(problem, asked.config):
        view.show_remark(remark)
    answers: dict[str, Answer] = {}
    prompts_shown: list[dict[str, str]] = []
    how = "" if question.seed is None else f", sampled with seed {question.seed}"
    for name, team in _list_teams(asked, agents).items():
        is_asked = team is agents.trained
        title = asked.title if is_asked else "base models"
        view.show_heading(title + how)
        for answer in agents.answer_problem(team, problem, question.seed):
            prompts = agents.read_prompts(answer.steps[-1])
            if question.prompts and prompts not in prompts_shown:  # both teams may have had the same prompts
                view.show_prompts(prompts)
                prompts_shown.append(prompts)
            view.show_turn(answer, team.env.num_turns)
            answers[name] = answer
    view.show_comparison(answers)


def _answer_as_json(asked: AskedTeam, agents: AskedAgents, problem: Problem, question: Question) -> dict[str, object]:
    """Return the answers of all teams as plain JSON values."""
    answers = {}
    for name, team in _list_teams(asked, agents).items():
        *_, whole = agents.answer_problem(team, problem, question.seed)
        answers[name] = answer_as_json(whole, asked.config.reward)
        if question.prompts:
            answers[name]["prompts"] = [agents.read_prompts(step) for step in whole.steps]
    shown = {"id": problem.task_id, "prompt": problem.prompt, "test": problem.test}
    remark = describe_knowledge(problem, asked.config) or None
    return {"team": asked.title, "problem": shown, "remark": remark, "seed": question.seed, **answers}


def describe_knowledge(problem: Problem, config: RunConfig) -> str:
    """State what to expect of answers to a user's own problem; empty if it is worded like the training problems."""
    if problem.task_id != TASK_ID:
        return ""
    if problem.tags:
        return "worded like the training problems: function name and tests are generated as for them"
    unknown = explain_words(problem, config.problems)
    remarks = [unknown] if unknown else []
    shipped = sorted({agent.model for agent in config.agents if locate_model(agent.model) != agent.model})
    if shipped and (unknown or not isinstance(config.problems, ReadsSentences)):
        tiny = f"{', '.join(shipped)} is a tiny model that can solve only problems like those of this run"
        remarks.insert(0, tiny)
    return "; ".join(remarks)
