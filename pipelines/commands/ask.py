"""``magrpo ask``: put a problem to trained agents, beside the untrained ones; without a problem, a session."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from magrpo.asking.answers import Answer, AskedAgents, open_asked_agents
from magrpo.asking.problems import (
    TASK_ID,
    explain_words,
    find_problem,
    load_asked_problems,
    write_problem,
    writes_programs,
)
from magrpo.asking.teams import AskedTeam, find_asked_team
from magrpo.assets import locate_model
from magrpo.config.run import RunConfig
from magrpo.interfaces import ReadsSentences
from magrpo.plugins import ConfigError, list_choices
from magrpo.process.signals import EndedBySignal, find_exit_code
from magrpo.progress.activity import LOADING, show_activity
from magrpo.stages.backend import Team
from magrpo.types import Problem
from pipelines.commands.answer_view import AnswerView, answer_as_json

_PROGRAMS = """A problem is a sentence, or a function's signature and docstring, ended by an empty line.
Lines that begin with "assert" are its tests."""
_TEXTS = "A problem is a text, ended by an empty line."
_HELP = """
  /problem          the next held-out problem of the run
  /problem ID       a problem of the run: its id or a part of it
  /problems [WORD]  list problem ids, or only those that contain a word
  /again            the last problem again, sampled at the training temperature
  /prompts          show or hide each agent's prompt
  /help             this text
  /quit             leave (also Ctrl-D)"""
_COMMANDS = ("/problem", "/problems", "/again", "/prompts", "/help", "/quit")
_NUM_LISTED = 20


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask: the text of a problem or the id of one; neither: open a session."""

    text: str | None = None
    problem: str | None = None
    """Id of a problem of the run, or a part of it."""
    tests: Sequence[str] = ()
    seed: int | None = None
    """Seed of a sampled answer; None: a greedy one."""
    untrained: bool = True
    """Whether the untrained agents answer, too."""
    as_json: bool = False
    prompts: bool = False
    """Whether the prompt that each agent read is shown."""


def ask_agents(run: str, root: Path, checkpoint: int | None, overrides: Sequence[str], question: Question) -> int:
    """Answer ``question`` by the team called ``run``; the exit code. Raises ConfigError if either is unusable."""
    asked = find_asked_team(run, root, checkpoint, overrides)
    problem = _choose_problem(asked, question)
    console = Console(highlight=False)
    try:
        with _open_agents(asked, question.untrained) as agents:
            questioner = Questioner(asked, agents, console, question.prompts)
            if problem is None:
                Session(questioner).run()
            elif question.as_json:
                print(json.dumps(questioner.answer_as_json(problem, question.seed), indent=2))
            else:
                questioner.show_answers(problem, question.seed)
    except KeyboardInterrupt as error:
        return find_exit_code(error)
    return 0


def _choose_problem(asked: AskedTeam, question: Question) -> Problem | None:
    """The problem of a question; None: a session is to be opened."""
    reward, text = asked.config.reward, question.text
    if question.problem is not None:
        if text is not None or question.tests:
            raise ConfigError("--problem names a problem of the run: leave out PROBLEM and --test")
        return find_problem(load_asked_problems(asked), question.problem)
    if text is None and sys.stdin.isatty() and not question.as_json:
        if question.tests:
            raise ConfigError("--test needs a problem; in a session, type tests below the problem")
        return None
    if text is None:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text.strip():
            raise ConfigError("ask needs a problem: PROBLEM, --problem ID, or text on standard input")
    return write_problem(text, question.tests, reward, asked.config.problems)


@contextmanager
def _open_agents(asked: AskedTeam, with_untrained: bool) -> Iterator[AskedAgents]:
    """The loaded agents; meanwhile standard error says what is being loaded."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print("loading libraries, agents and sandbox", soft_wrap=True)
    with show_activity(LOADING["libraries"], console):
        import magrpo.model.policy  # torch and transformers, under the spinner  # noqa: F401
    bases = ", ".join(dict.fromkeys(agent.model for agent in asked.config.agents))
    with ExitStack() as opened:
        with show_activity(f"loading agents on {bases}, starting the sandbox", console):
            agents = opened.enter_context(open_asked_agents(asked, with_untrained=with_untrained))
        yield agents


def describe_shipped_bases(config: RunConfig) -> str:
    """What to expect of models that ship with the project, which are tiny; empty if none of the agents has one."""
    shipped = sorted({agent.model for agent in config.agents if locate_model(agent.model) != agent.model})
    return (
        f"{', '.join(shipped)} is a tiny model that can solve only problems like those of this run" if shipped else ""
    )


class Questioner:
    """Puts problems to loaded agents and shows their answers, and the prompts they read if ``shows_prompts``."""

    def __init__(self, asked: AskedTeam, agents: AskedAgents, console: Console, shows_prompts: bool) -> None:
        self.asked, self.console, self.shows_prompts = asked, console, shows_prompts
        roles = asked.config.env.roles()
        author = next(agent.name for agent in asked.config.agents if agent.role == roles[-1])
        self.view = AnswerView(console, asked.config.reward, author)
        self._agents = agents
        self._teams = {"trained" if asked.weights else "untrained": agents.trained}
        if agents.untrained is not None:
            self._teams["untrained"] = agents.untrained

    def show_answers(self, problem: Problem, seed: int | None) -> None:
        """Let the teams answer one after the other, shown while they write; then compare them."""
        self.view.show_problem(problem)
        if remark := self._describe_knowledge(problem):
            self.view.show_remark(remark)
        answers: dict[str, Answer] = {}
        prompts_shown: list[dict[str, str]] = []
        how = "" if seed is None else f", sampled with seed {seed}"
        for title, team in self._teams.items():
            self.view.show_heading((self.asked.title if title == "trained" else "before training") + how)
            for answer in self._answer_turns(team, problem, seed):
                prompts = self._agents.read_prompts(answer.steps[-1])
                if self.shows_prompts and prompts not in prompts_shown:
                    self.view.show_prompts(prompts)
                    prompts_shown.append(prompts)
                self.view.show_turn(answer, team.env.num_turns)
                answers[title] = answer
        self.view.show_comparison(answers)

    def answer_as_json(self, problem: Problem, seed: int | None) -> dict[str, object]:
        """The answers of all teams as plain JSON values."""
        answers = {}
        for title, team in self._teams.items():
            *_, whole = self._agents.answer_problem(team, problem, seed)
            answers[title] = answer_as_json(whole, self.asked.config.reward)
            if self.shows_prompts:
                answers[title]["prompts"] = [self._agents.read_prompts(step) for step in whole.steps]
        shown = {"id": problem.task_id, "prompt": problem.prompt, "test": problem.test}
        remark = self._describe_knowledge(problem) or None
        return {"team": self.asked.title, "problem": shown, "remark": remark, "seed": seed, **answers}

    def _describe_knowledge(self, problem: Problem) -> str:
        """What to expect of the answers to a problem written by a user; empty for the words of the training."""
        if problem.task_id != TASK_ID:
            return ""
        if problem.tags:
            return "worded like the training problems: function name and tests are generated as for them"
        unknown = explain_words(problem, self.asked.config.problems)
        known_by_all = isinstance(self.asked.config.problems, ReadsSentences) and not unknown
        tiny = "" if known_by_all else describe_shipped_bases(self.asked.config)
        return "; ".join(filter(None, [tiny, unknown]))

    def _answer_turns(self, team: Team, problem: Problem, seed: int | None) -> Iterator[Answer]:
        """The answer after each turn; while a turn is made, the terminal shows what the agents write."""
        stream = self.view.open_stream()
        turns = self._agents.answer_problem(team, problem, seed, stream)
        while True:
            with stream:
                answer = next(turns, None)
            if answer is None:
                return
            yield answer
            if len(answer.steps) == team.env.num_turns:
                return


class Session:
    """Problems typed in a terminal, until the end of input."""

    def __init__(self, questioner: Questioner) -> None:
        self._questioner = questioner
        self._asked, self._console = questioner.asked, questioner.console
        self._held_out = load_asked_problems(self._asked)
        self._next = iter(self._held_out.values())
        self._last: Problem | None = None
        self._seed = 0
        """Number of samples drawn by /again."""

    def run(self) -> None:
        """Read and answer problems until /quit or Ctrl-D."""
        import readline  # gives input() editing and history

        readline.parse_and_bind("tab: complete")
        agents = " and ".join(agent.name for agent in self._asked.config.agents)
        self._console.print(Text(f"{self._asked.title}: {agents}"))
        self._console.print(Text("Type a problem, /problem for one of the run, /help or /quit. A problem of the run:"))
        self._questioner.view.show_problem(next(iter(self._held_out.values())))
        if tiny := describe_shipped_bases(self._asked.config):
            self._questioner.view.show_remark(f"{tiny}: word your problem like these")
        while (typed := self._read_problem()) is not None:
            try:
                if not self._handle(typed):
                    return
            except ConfigError as error:
                self._console.print(Text(f"magrpo: {error}"))
            except EndedBySignal:
                raise
            except KeyboardInterrupt:
                self._console.print("interrupted")

    def _read_problem(self) -> str | None:
        """A command or the text of a problem; None at the end of input or after Ctrl-C."""
        try:
            lines = [input("\nproblem> ")]
            while lines[-1].strip() and self._goes_on(lines[0]):
                lines.append(input("     ... "))
        except EndedBySignal:
            raise
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return "\n".join(lines).rstrip()

    def _goes_on(self, first: str) -> bool:
        """Whether a problem that begins with the line ``first`` may have several lines."""
        if first.startswith("/"):
            return False
        return not writes_programs(self._asked.config.reward) or first.startswith(("def ", "from ", "import ", "@"))

    def _handle(self, typed: str) -> bool:
        """Carry out a command or answer a problem; whether the session goes on."""
        command, _, argument = typed.partition(" ")
        argument = argument.strip()
        match command:
            case "":
                return True
            case "/quit" | "/exit" | "/q":
                return False
            case "/help" | "/?":
                self._console.print(Text((_PROGRAMS if writes_programs(self._asked.config.reward) else _TEXTS) + _HELP))
            case "/problems":
                ids = [task_id for task_id in self._held_out if argument.lower() in task_id.lower()]
                more = [f"and {len(ids) - _NUM_LISTED} more"] if len(ids) > _NUM_LISTED else []
                self._console.print(Text("\n".join([*ids[:_NUM_LISTED], *more]) or f"no id contains {argument!r}"))
            case "/problem":
                problem = find_problem(self._held_out, argument) if argument else next(self._next, None)
                if problem is None:
                    raise ConfigError("that was the last problem of the run")
                self._answer(problem, None)
            case "/prompts":
                self._questioner.shows_prompts = not self._questioner.shows_prompts
                state = "shown" if self._questioner.shows_prompts else "hidden"
                self._console.print(f"prompts are {state} from now on")
            case "/again":
                if self._last is None:
                    raise ConfigError("/again repeats a problem; type one first")
                self._seed += 1
                self._answer(self._last, self._seed)
            case _ if command.startswith("/"):
                raise ConfigError(f"no command {command}; {list_choices(command, _COMMANDS)}")
            case _:
                self._answer(write_problem(typed, (), self._asked.config.reward, self._asked.config.problems), None)
        return True

    def _answer(self, problem: Problem, seed: int | None) -> None:
        self._last = problem
        self._questioner.show_answers(problem, seed)
