"""The environment ``program``: a program of the user's asks the agents, as it would ask any chat model."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from magrpo.errors import ConfigError
from magrpo.plugins import Plugin, name_module
from magrpo.types import Observation, PastTurn, Problem

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE_FUNCTION = re.compile(r"(\S+\.py):([A-Za-z_]\w*)")
"""What a user may write in place of ``module:function``."""
_DEFINING = ("*", "__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr", "modules")
"""Names in the text of a module that may give it attributes which the text does not name."""
_SCRIPTS = (".py", ".sh", ".js")
"""Ends of the names of files that an interpreter runs."""


class AgentProgram(Plugin):
    """An episode is one run of a program, which asks agents through the gateway (:mod:`magrpo.gateway`).

    To the rest of the project an episode is a single turn whose texts the program returns. See ``docs/programs.md``.
    """

    num_turns: ClassVar[int] = 1

    kind: str = "program"
    run: str
    """The program: ``module:function``, imported from the working directory and called with a problem and the agents;
    or a command, in which ``{problem_file}`` stands for the path of the problem as JSON."""
    writes: tuple[str, ...] = ()
    """The roles of the reward, for each of which the program returns a text. Empty: it returns its own reward, see
    ``reward.kind = "returned"``."""
    models: dict[str, str] = Field(default_factory=dict)
    """Model names that the program asks for, and the agents that answer. Any other name must be an agent's role, which
    is its name unless it has another."""
    time_limit_s: float = Field(60.0, gt=0)
    """Time limit of an episode in seconds, without the time in which it waits for completions."""
    concurrency: int = Field(256, ge=1, le=4096)
    """Maximum number of episodes that run at once."""
    fresh_processes: bool = False
    """Play every episode in a process of its own, forked after the program was imported. If false, a process plays
    many episodes, one after another, which is faster for short ones; the program must then keep nothing in its modules
    that would change a later episode. A command always has a process of its own."""
    max_calls: int = Field(64, ge=1)
    """Maximum number of completions that an episode may ask for; further requests are refused."""
    failure_reward: float = 0.0
    """Joint reward of an episode that failed, timed out or asked no agent."""
    max_failed_frac: float = Field(0.5, ge=0, le=1)
    """Stop the run if more than this share of the episodes of a stage failed, timed out or asked no agent."""
    batch_wait_s: float = Field(0.003, gt=0, le=10)
    """Time without a new request after which a batch is sampled if every episode waits; it is ten times as long if
    some episode does not. Longer waits make larger batches. With long ones the batches, and so the last bits of
    log-probabilities, do not depend on the load of the machine."""
    ignore_unsupported: bool = False
    """Answer requests with ``response_format``, a forced ``tool_choice`` and the like as if they had none. If false,
    they are refused, because constrained decoding would sample from another distribution than the one that is
    trained."""
    response_template: Path | None = None
    """JSON file that says how tool calls are read from a completion, in the form of transformers' response templates.
    None: the tokenizer's own, or the Hermes form if the chat template writes that. Prompts without a
    chat template do not describe tools: with this file the model must then write calls by itself."""

    @field_validator("run")
    @classmethod
    def _is_function_or_command(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"cannot be read as a command: {error}") from None
        if not words:
            raise ValueError('must be "module:function" or a command')
        if as_file := _FILE_FUNCTION.fullmatch(value):
            raise ValueError(f'name the module, "{name_module(as_file[1])}:{as_file[2]}", not its file')
        return value

    @property
    def is_function(self) -> bool:
        """Whether ``run`` names a function rather than a command."""
        return _FUNCTION.fullmatch(self.run) is not None

    def read_sources(self) -> list[str]:
        """The texts of the program's own files: its module, or the files that its command names, and its template.

        Raises ConfigError if the module, the script that the command names first, or the template is not found.
        """
        paths = self._find_module()[:1] if self.is_function else [Path(name) for name in self.list_files()]
        if self.response_template is not None:
            if not self.response_template.is_file():
                raise _name_missing(f"env.response_template = {str(self.response_template)!r}")
            paths.append(self.response_template)
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths]

    def check_found(self) -> None:
        """Raise ConfigError if the program, or a file that it names, is not found from the working directory."""
        self.read_sources()
        module, _, function = self.run.partition(":")
        paths = self._find_module() if self.is_function else []
        if paths and not any(_may_define(path, function) for path in paths):
            raise ConfigError(
                f"env.run = {self.run!r}: {module} defines no {function!r} ({paths[0]}); name one of its functions"
            )
        command = "" if self.is_function else shlex.split(self.run)[0]
        if command and shutil.which(command) is None:
            raise ConfigError(
                f"env.run = {self.run!r}: there is no program {command!r}, neither on PATH nor from {Path.cwd()}; "
                "install it, or give its path"
            )

    def _find_module(self) -> list[Path]:
        """The files that may be the module: in the working directory, and where Python finds it."""
        module = self.run.partition(":")[0]
        in_folder = module.replace(".", "/")
        names = [f"{in_folder}.py", f"{in_folder}/__init__.py"]
        is_installed = False
        with suppress(ImportError, ValueError):
            spec = find_spec(module)
            if spec is not None:
                is_installed = True  # maybe without a file, as the modules that are built in
                names.insert(1, str(spec.origin))
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found and not is_installed:
            raise _name_missing(f"env.run = {self.run!r}: module {module}")
        return found

    def list_files(self) -> list[str]:
        """The files among the arguments of the command; none of a function.

        Raises ConfigError if the script that the command names first is not found.
        """
        arguments = [] if self.is_function else shlex.split(self.run)[1:]
        # Path.is_file would raise an OSError where shell code is longer than the name of a file may be.
        found = [word for word in arguments if os.path.isfile(word)]  # noqa: PTH113
        first = next((word for word in arguments if not word.startswith("-")), "")
        is_script = Path(first).suffix in _SCRIPTS and not re.search(r"\s", first)  # with spaces it may be shell code
        if is_script:
            self.check_files([first])
        return found

    def check_files(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a file is not found from the working directory."""
        for name in names:
            if not Path(name).is_file():
                raise _name_missing(f"env.run = {self.run!r}: {name}")

    @field_validator("models")
    @classmethod
    def _has_names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        if not all(value) or not all(value.values()):
            raise ValueError("needs a model name and the role of an agent on either side")
        return value

    def roles(self) -> tuple[str, ...]:
        """The roles of the reward: the agents fill none, because the program decides what becomes of their answers."""
        return self.writes

    def acting(self, turn: int) -> tuple[str, ...]:
        """No role: it is the program that acts."""
        return ()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        """Never called."""
        raise TypeError("a program writes the prompts of its agents itself")


def _may_define(path: Path, name: str) -> bool:
    """Whether a module can have an attribute of this name, by its text; without certainty, True."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # its import will say so, with the line
        return True
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return not names.isdisjoint({name, *_DEFINING})


def _name_missing(what: str) -> ConfigError:
    return ConfigError(f"{what} is not found from {Path.cwd()}; start the command in the folder of the program")
