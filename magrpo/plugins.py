"""Plug-ins: the way to extend the project, the tables that name them, and the validation of a configuration.

A plug-in is a frozen pydantic model that is its own configuration. A configuration names it by ``kind``: a name from
the tables, or ``"package.module:Class"`` for a class outside this project. Every other key is a field of the class. The
tables hold dotted paths, so that a heavy library is loaded only if its plug-in is chosen.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo

from magrpo.text import replace_surrogates

TABLES: Mapping[str, Mapping[str, str]] = {
    "problems": {
        "coopcode": "magrpo.problems.coopcode:CoopCode",
        "relay": "magrpo.problems.relay:Relay",
        "humaneval": "magrpo.problems.humaneval:HumanEval",
        "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
        "humanevalplus": "magrpo.problems.humaneval:HumanEvalPlus",
        "mbpp": "magrpo.problems.mbpp:Mbpp",
        "mbppplus": "magrpo.problems.mbpp:MbppPlus",
        "livecodebench": "magrpo.problems.livecodebench:LiveCodeBench",
        "notes": "magrpo.problems.notes:Notes",
        "tldr": "magrpo.problems.writing:Tldr",
        "arxiv": "magrpo.problems.writing:Arxiv",
        "reasoning_gym": "magrpo.problems.reasoning_gym:ReasoningGym",
    },
    "env": {
        "coding": "magrpo.envs.coding:CodingEnv",
        "solo": "magrpo.envs.coding:SoloEnv",
        "sequential": "magrpo.envs.coding:SequentialEnv",
        "team": "magrpo.envs.coding:TeamEnv",
        "writing": "magrpo.envs.writing:WritingEnv",
        "writing_solo": "magrpo.envs.writing:SoloWritingEnv",
        "writing_sequential": "magrpo.envs.writing:SequentialWritingEnv",
        "relay": "magrpo.envs.relay:RelayEnv",
        "relay_in_turn": "magrpo.envs.relay:RelayInTurnEnv",
        "relay_solo": "magrpo.envs.relay:SoloRelayEnv",
        "program": "magrpo.envs.program:AgentProgram",
    },
    "reward": {
        "coding": "magrpo.rewards.coding:CodingReward",
        "solo": "magrpo.rewards.coding:SoloReward",
        "team": "magrpo.rewards.coding:TeamReward",
        "writing": "magrpo.rewards.writing:WritingReward",
        "writing_solo": "magrpo.rewards.writing:SoloWritingReward",
        "relay": "magrpo.rewards.relay:RelayReward",
        "relay_solo": "magrpo.rewards.relay:RelayReward",
        "returned": "magrpo.rewards.returned:ReturnedReward",
    },
    "sandbox": {
        "none": "magrpo.sandboxes.none:NoSandbox",
        "pool": "magrpo.sandboxes.pool:PoolSandbox",
    },
    "engine": {
        "auto": "magrpo.engines.auto:AutoEngine",
        "transformers": "magrpo.engines.transformers:TransformersEngine",
        "vllm": "magrpo.engines.vllm:VllmEngine",
    },
}
"""The plug-ins of each section of a configuration, by ``kind``."""

MEMBERS: Mapping[str, Sequence[str]] = {
    "problems": ("load",),
    "env": ("num_turns", "roles", "acting", "observe"),
    "reward": ("maxima", "fraction", "passed", "executions", "price"),
    "sandbox": ("open",),
    "engine": ("open",),
}
"""The members that the plug-ins of each section must have (:mod:`magrpo.interfaces`)."""


MAX_QUOTED = 200
"""Longest quotation of a value in a message, in characters."""
_MAX_LINE = 1600
"""Longest line of a message."""
_NAME = re.compile(r"[A-Za-z0-9]+")


ON_COMMAND_LINE = "on the command line"
"""The source of a mistake in an override, as messages name it."""
SYNONYMS: Mapping[str, Sequence[str]] = {
    "learning_rate": ("lr",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "scheduler": ("schedule",),
    "warmup": ("warmup_iterations",),
    "warmup_steps": ("warmup_iterations",),
    "grad_clip": ("max_grad_norm",),
    "clip_grad": ("max_grad_norm",),
    "batch_size": ("problems_per_iteration",),
    "micro_batch_size": ("micro_batch_tokens",),
    "epochs": ("num_iterations", "update_epochs"),
    "num_epochs": ("num_iterations", "update_epochs"),
    "num_train_epochs": ("num_iterations", "update_epochs"),
    "steps": ("num_iterations",),
    "num_steps": ("num_iterations",),
    "max_steps": ("num_iterations",),
    "iterations": ("num_iterations",),
    "n": ("group_size", "num_samples"),
    "num_generations": ("group_size",),
    "max_tokens": ("max_new_tokens",),
    "max_length": ("max_new_tokens",),
    "max_completion_length": ("max_new_tokens",),
    "turns": ("num_turns",),
    "discount": ("gamma",),
    "kl_coef": ("beta",),
    "clip_range": ("clip_low", "clip_high"),
    "epsilon": ("clip_low", "clip_high"),
    "importance_sampling_level": ("ratio",),
    "r": ("rank",),
    "lora_rank": ("rank",),
    "lora_alpha": ("alpha",),
    "template": ("chat_template",),
    "output_dir": ("root",),
    "dataset": ("source",),
    "model_name": ("model",),
    "model_name_or_path": ("model",),
}
"""Names that other trainers use for keys of this project, for hints."""
_Path = tuple[int | str, ...]
"""A key of a configuration by its parts; a number is the place of an item in a list."""
_MAX_DEPTH = 40
"""Deepest nesting of a configuration."""
_MAX_ERRORS = 20
"""Largest number of mistakes that a message lists."""
_UNIMPORTABLE = (
    *(ImportError, SyntaxError, SystemExit, NameError, AttributeError, TypeError, ValueError),
    *(LookupError, ArithmeticError, AssertionError, OSError, RuntimeError),
)
"""Errors that importing a user's module can raise."""


class ConfigError(ValueError):
    """A configuration, a flag or an input file is unusable. The message names it and the remedy."""

    def __str__(self) -> str:
        """The message, with long lines shortened by :func:`cut_lines`."""
        return cut_lines(super().__str__())


class PluginFailed(RuntimeError):
    """A method of a plug-in raised an exception. The message names class and method, and shows the last frames."""


class Section(BaseModel):
    """A part of the configuration: immutable; rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


class Plugin(Section):
    """A section that chooses and configures an implementation."""

    kind: str
    """Name of the implementation, or ``package.module:Class`` of your own."""


def cut_lines(message: str) -> str:
    """Cut the middle out of very long lines of ``message``, which may quote a file."""
    half = _MAX_LINE // 2
    return "\n".join(
        line if len(line) <= _MAX_LINE else f"{line[:half]} ... ({len(line) - 2 * half} characters) ... {line[-half:]}"
        for line in message.splitlines()
    )


def quote_value(value: object) -> str:
    """Quote ``value`` for a message: its ``repr``, or the beginning and the length of a long one."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


def quote_error(error: BaseException) -> str:
    """Quote the error of a library on one line, shortened, after its type unless the message makes sense alone."""
    text = " ".join(str(error).split())
    if not isinstance(error, OSError | ConfigError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def check_name(
    name: str, what: str = "name", reserved: Collection[str] = (), longest: int = 100, signs: str = "-_"
) -> str:
    """Return ``name`` if it can be part of files, metrics and URLs and is not ``reserved``; else raise ConfigError.

    ``what`` is the flag or the kind of name, for the message. ``signs`` may follow the first letter or digit.
    """
    letters = name[:1] + re.sub(f"[{re.escape(signs)}]", "0", name[1:])
    if not _NAME.fullmatch(letters) or len(name) > longest:
        shown = ", ".join(map(repr, signs))
        allowed = f"letters, digits, {shown}, at most {longest} of them, the first a letter or digit"
        raise ConfigError(f"{what} {quote_value(name)} cannot be used: a name consists of {allowed}")
    if name.lower() in reserved:
        raise ConfigError(f"{what} {name!r} is reserved: choose another one")
    return name


def list_choices(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """The end of an error message about an unknown name: the closest match, then every choice."""
    closest = difflib.get_close_matches(name[:MAX_QUOTED], list(known), n=1)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return f"{hint}choices: {', '.join(sorted(known))}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def import_plugin(table: Mapping[str, str], kind: str) -> type[Plugin]:
    """Import the class named by ``kind``. Raises ValueError, with the choices, if it cannot be loaded."""
    path = table.get(kind, kind)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ValueError(f"unknown kind {quote_value(kind)}: {list_choices(kind, table)}, or 'package.module:Class'")
    try:
        cls = getattr(import_module(module_name), class_name)
    except _UNIMPORTABLE as error:
        raise ValueError(f"cannot load kind {quote_value(kind)}: {quote_error(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ValueError(f"kind {quote_value(kind)} is not a subclass of magrpo.plugins.Plugin")
    return cls


def build_plugin(section: str, value: Any) -> Any:
    """Build the plug-in that ``{"kind": name, **fields}`` describes; return anything but a mapping unchanged."""
    if not isinstance(value, Mapping):
        return value
    table = TABLES[section]
    if "kind" not in value:
        raise ValueError(f"needs a key 'kind': {list_choices('', table)}")
    kind = str(value["kind"])
    cls = import_plugin(table, kind)
    if absent := [name for name in MEMBERS[section] if name not in cls.model_fields and not hasattr(cls, name)]:
        raise ValueError(f"kind {quote_value(kind)} cannot be used as [{section}]: it has no {', '.join(absent)}")
    return cls.model_validate(value)


def plugin_field(section: str) -> Any:
    """The type of a configuration field that chooses and configures a plug-in of ``TABLES[section]``."""
    return Annotated[SerializeAsAny[Plugin], BeforeValidator(partial(build_plugin, section))]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError if it is unusable; if it is missing, suggests a file with a similar name."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, thousands of digits
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None


def validate_config(model: type[SectionT], tree: dict[str, Any], overrides: Sequence[str], source: str) -> SectionT:
    """Apply overrides to ``tree`` in place, and validate it.

    The message of a ConfigError starts with ``source``, or says that the mistake was made on the command line.
    """
    changed = [_apply_override(tree, override) for override in overrides]
    _check_values(tree, changed, source)
    try:
        return model.model_validate(tree)
    except PluginFailed as error:
        raise ConfigError(f"{source}: {error}") from error
    except ValidationError as error:
        lines = list(islice(_explain_errors(error, tree, model, changed, source), _MAX_ERRORS))
        if more := error.error_count() - len(lines):
            lines.append(f"{source}: and {more} more mistakes")
        raise ConfigError("\n".join(lines)) from None


def _check_values(tree: dict[str, Any], changed: Sequence[_Path], source: str) -> None:
    """Raise ConfigError if a configuration is nested too deeply, or has a value that its files cannot store."""
    waiting: list[tuple[_Path, Any]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        fault = ""
        if len(path) > _MAX_DEPTH:
            fault = f"nested more than {_MAX_DEPTH} deep"
        elif isinstance(value, Mapping):
            waiting += [((*path, str(key)), item) for key, item in value.items()]
            value = "".join(map(str, value))
        elif isinstance(value, list | tuple):
            waiting += [((*path, number), item) for number, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            fault = f"must be a finite number, not {value}"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            fault = "must lie between -2^63 and 2^63"
        if isinstance(value, str) and ("\0" in value or replace_surrogates(value) != value):
            fault = "must not contain null characters or lone surrogates"
        if fault:
            where = _name_source(path, changed, source)
            raise ConfigError(f"{where}: {'.'.join(map(str, path)):.{MAX_QUOTED}}: {fault}")


def _name_source(loc: _Path, changed: Sequence[_Path], source: str) -> str:
    """The source of the value at ``loc``: ``source``, an override, or ``source`` as changed by overrides."""
    if any(loc[: len(path)] == path for path in changed):
        return ON_COMMAND_LINE
    for path in changed:
        *section, key = path
        # Another kind allows and requires other keys of its section.
        changes_kind = key == "kind" and loc[: len(section)] == tuple(section)
        if changes_kind or path[: len(loc)] == loc:
            return f"{source}, as changed {ON_COMMAND_LINE}"
    return source


def _apply_override(tree: dict[str, Any], override: str) -> _Path:
    """Apply ``section.key=value`` to ``tree``; returns the path of the value, with items of lists by number."""
    key, equals, text = override.partition("=")
    where = f"{ON_COMMAND_LINE}: {quote_value(override)}"
    if not equals or not key:
        raise ConfigError(f"{where}: an override is written section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, thousands of digits, or nested too deeply: a plain string
        value = text
    parts = key.split(".")
    node: Any = tree
    path: _Path = ()
    try:
        for depth, part in enumerate(parts):
            place: Any = part
            if isinstance(node, list):
                place = _find_item(node, part, ".".join(parts[:depth]), where)
            path = (*path, place)
            if depth == len(parts) - 1:
                node[place] = value
            else:
                node = node[place] if isinstance(node, list) else node.setdefault(place, {})
    except (TypeError, AttributeError):
        raise ConfigError(f"{where}: {key:.{MAX_QUOTED}} is not a key of the configuration") from None
    return path


def _find_item(items: Sequence[Any], part: str, key: str, where: str) -> int:
    """The place of a list item by its number, or by its name if the items are tables with a ``name``."""
    if re.fullmatch("[0-9]{1,9}", part) and int(part) < len(items):
        return int(part)
    names = [str(item["name"]) if isinstance(item, Mapping) and "name" in item else "" for item in items]
    if part and names.count(part) == 1:
        return names.index(part)
    shown = []
    for number, name in enumerate(names[:_MAX_ERRORS]):
        shown.append(f"{key}.{number} ({name})" if name else f"{key}.{number}")
    listed = ", ".join(shown)
    raise ConfigError(f"{where}: {key} has no {quote_value(part)}; there are {len(items)} {key}: {listed}")


def _explain_errors(
    error: ValidationError, tree: dict[str, Any], root: type[Section], changed: Sequence[_Path], source: str
) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])[:MAX_QUOTED]
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {_suggest_key(item['loc'], tree, root)}"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "literal_error" and isinstance(item["input"], str):
            choices = re.findall(r"'([^']+)'", str(item["ctx"]["expected"]))
            message = f"unknown value {quote_value(item['input'])}; {list_choices(item['input'], choices)}"
        elif item["type"] != "value_error":
            message = f"{message}, got {quote_value(item['input'])}"
        found_in = _name_source(item["loc"], changed, source)
        yield f"{found_in}: {where}: {message}" if where else f"{found_in}: {message}"


def _suggest_key(loc: _Path, tree: dict[str, Any], root: type[Section]) -> str:
    """The end of an error message about the unknown key at ``loc``: keys of this or another section."""
    key = str(loc[-1])
    known = _known_keys(loc[:-1], tree, root)
    if meant := [name for name in SYNONYMS.get(key, ()) if name in known]:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    elsewhere = find_keys(key, root, tree)
    is_exact = key in SYNONYMS or any(dotted.endswith(f".{key}") for dotted in elsewhere)
    if is_exact or (elsewhere and not difflib.get_close_matches(key, known, n=1)):
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return list_choices(key, known)


def find_keys(name: str, root: type[Section], tree: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose last part is ``name`` or a synonym, else the closest name; keys of agents come last.

    Only plug-ins that ``tree`` chooses have keys. Rows of baselines have none, because a command writes them.
    """
    keys = [key for key, _ in walk_fields(root, tree) if not key.startswith("baselines.rows")]
    by_name = {key.rpartition(".")[2]: key for key in keys}
    meant = [known for known in (name, *SYNONYMS.get(name, ())) if known in by_name]
    closest = meant or difflib.get_close_matches(name, list(by_name), n=1)
    found = [key for key in keys if key.rpartition(".")[2] in closest]
    return sorted(found, key=lambda key: re.search(r"\.\d+\.", key) is not None)


def walk_fields(model: type[Section], tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The dotted key and the field of every value of a configuration, with the plug-ins that ``tree`` chooses.

    A list of tables (``agents``) has the keys of its first item: ``agents.0.name``.
    """
    for name, field in model.model_fields.items():
        section, is_list = _section_class(name, field, tree)
        if section is None:
            yield f"{prefix}{name}", field
        else:
            item = "0." if is_list else ""
            yield from walk_fields(section, {}, f"{prefix}{name}.{item}")


def _section_class(name: str, field: FieldInfo, tree: Mapping[str, Any]) -> tuple[type[Section] | None, bool]:
    """The class of the section in ``field``, None for a plain value; and whether the field is a list of sections.

    The class of a plug-in is the one that ``tree`` chooses, or :class:`Plugin` if that cannot be loaded.
    """
    if field.annotation is Plugin and name in TABLES:
        try:
            return import_plugin(TABLES[name], str(tree[name]["kind"])), False
        except (KeyError, TypeError, ValueError):
            return Plugin, False
    arguments = getattr(field.annotation, "__args__", ())
    for annotation in (field.annotation, *arguments):
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return annotation, annotation is not field.annotation
    return None, False


def _known_keys(loc: _Path, tree: dict[str, Any], root: type[Section]) -> list[str]:
    """The keys of the section at ``loc``, including those of the plug-in it chooses."""
    model: type[Section] = root
    for part in loc:
        if isinstance(part, str):
            section, _ = _section_class(part, model.model_fields[part], tree)
            assert section is not None
            model = section
    return list(model.model_fields)
