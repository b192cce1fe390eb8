"""Reading a configuration: which plug-ins a section may choose, overrides, and errors that name the remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from magrpo import engines, envs, problems, rewards, sandboxes
from magrpo.registry import ConfigError, Plugin, Section, Table, build, choices, resolve

SectionT = TypeVar("SectionT", bound=Section)

TABLES: dict[str, Table] = {
    "problems": problems.TABLE,
    "env": envs.TABLE,
    "reward": rewards.TABLE,
    "sandbox": sandboxes.TABLE,
    "engine": engines.TABLE,
}
"""The sections that choose a plug-in, with their choices."""


def plugin(section: str) -> Any:
    """The type of a field that chooses and configures a plug-in of ``TABLES[section]``."""
    return Annotated[SerializeAsAny[Plugin], BeforeValidator(partial(build, TABLES[section]))]


def validated(model: type[SectionT], tree: dict[str, Any], overrides: Sequence[str], source: str) -> SectionT:
    """Apply overrides to ``tree``, in place, and read it as ``model``.

    Raises:
        ConfigError: a key or a value is unusable; the message starts with ``source``.
    """
    for override in overrides:
        _apply(tree, override)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in _explain(error, tree, model))) from None


def _apply(tree: dict[str, Any], override: str) -> None:
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


def _explain(error: ValidationError, tree: dict[str, Any], root: type[Section]) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {choices(str(item['loc'][-1]), _known_keys(item['loc'][:-1], tree, root))}"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] not in {"value_error"}:
            message = f"{message}, got {item['input']!r}"
        yield f"{where}: {message}" if where else message


def _known_keys(loc: tuple[int | str, ...], tree: dict[str, Any], root: type[Section]) -> list[str]:
    """The keys of the section at ``loc``: all of its plug-in's where it chooses one."""
    model: Any = root
    for part in loc:
        if part in TABLES:
            model = resolve(TABLES[str(part)], tree[str(part)]["kind"])
        elif isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = next((arg for arg in getattr(annotation, "__args__", ()) if isinstance(arg, type)), annotation)
    return list(model.model_fields)
