"""Plug-ins: the one way to extend the project, the tables that name them, and reading a configuration.

A plug-in is a frozen pydantic model that is its own configuration. A configuration names it by ``kind``: a name from
the tables, whose dotted paths load a heavy library only when it is chosen, or ``"package.module:Class"`` for a class
outside this project. Every other key is a field of the class.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationError

TABLES: Mapping[str, Mapping[str, str]] = {
    "problems": {
        "coopcode": "magrpo.problems.coopcode:CoopCode",
        "humaneval": "magrpo.problems.humaneval:HumanEval",
        "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
        "humanevalplus": "magrpo.problems.humaneval:HumanEvalPlus",
        "mbpp": "magrpo.problems.mbpp:Mbpp",
        "mbppplus": "magrpo.problems.mbpp:MbppPlus",
        "livecodebench": "magrpo.problems.livecodebench:LiveCodeBench",
        "apps": "magrpo.problems.contests:Apps",
        "codecontests": "magrpo.problems.contests:CodeContests",
        "notes": "magrpo.problems.notes:Notes",
        "tldr": "magrpo.problems.writing:Tldr",
        "arxiv": "magrpo.problems.writing:Arxiv",
    },
    "env": {
        "coding": "magrpo.envs.coding:CodingEnv",
        "solo": "magrpo.envs.coding:SoloEnv",
        "sequential": "magrpo.envs.coding:SequentialEnv",
        "team": "magrpo.envs.coding:TeamEnv",
        "writing": "magrpo.envs.writing:WritingEnv",
    },
    "reward": {
        "coding": "magrpo.rewards.coding:CodingReward",
        "solo": "magrpo.rewards.coding:SoloReward",
        "team": "magrpo.rewards.coding:TeamReward",
        "writing": "magrpo.rewards.writing:WritingReward",
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


class ConfigError(ValueError):
    """A configuration, a flag or an input file is unusable. The message names it and the remedy."""


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys rejected, every field documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


SectionT = TypeVar("SectionT", bound=Section)


class Plugin(Section):
    """A section that chooses and configures an implementation."""

    kind: str
    """Name of the implementation, or ``package.module:Class`` of your own."""


def list_choices(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """The tail of an error about an unknown name: the closest match, then every choice."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return f"{hint}choices: {', '.join(sorted(known))}"


def import_plugin(table: Mapping[str, str], kind: str) -> type[Plugin]:
    """Import the class named by ``kind``; ValueError, with the choices, if there is none."""
    path = table.get(kind, kind)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ValueError(f"unknown kind {kind!r}: {list_choices(kind, table)}, or 'package.module:Class'")
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load kind {kind!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ValueError(f"kind {kind!r} is not a subclass of magrpo.plugins.Plugin")
    return cls


def build_plugin(table: Mapping[str, str], value: Any) -> Any:
    """Build the plug-in described by ``{"kind": name, **fields}``; return anything else unchanged."""
    if not isinstance(value, Mapping):
        return value
    if "kind" not in value:
        raise ValueError(f"needs a key 'kind': {list_choices('', table)}")
    return import_plugin(table, str(value["kind"])).model_validate(value)


def plugin_field(section: str) -> Any:
    """The type of a configuration field that chooses and configures a plug-in of ``TABLES[section]``."""
    return Annotated[SerializeAsAny[Plugin], BeforeValidator(partial(build_plugin, TABLES[section]))]


def validate_config(model: type[SectionT], tree: dict[str, Any], overrides: Sequence[str], source: str) -> SectionT:
    """Apply overrides to ``tree`` in place and validate it; messages of ConfigErrors start with ``source``."""
    for override in overrides:
        _apply_override(tree, override)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in _explain_errors(error, tree, model))) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override is written section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.split(".")
    node: Any = tree
    try:
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[int(leaf) if isinstance(node, list) else leaf] = value
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ConfigError(f"{override!r}: {key} is not a key of the configuration") from None


def _explain_errors(error: ValidationError, tree: dict[str, Any], root: type[Section]) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {list_choices(str(item['loc'][-1]), _known_keys(item['loc'][:-1], tree, root))}"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] != "value_error":
            message = f"{message}, got {item['input']!r}"
        yield f"{where}: {message}" if where else message


def _known_keys(loc: tuple[int | str, ...], tree: dict[str, Any], root: type[Section]) -> list[str]:
    """The keys of the section at ``loc``, including those of the plug-in it chooses."""
    model: Any = root
    for part in loc:
        if part in TABLES:
            model = import_plugin(TABLES[str(part)], tree[str(part)]["kind"])
        elif isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = next((arg for arg in getattr(annotation, "__args__", ()) if isinstance(arg, type)), annotation)
    return list(model.model_fields)
