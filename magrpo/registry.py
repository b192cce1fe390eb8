"""The only extension mechanism: a plug-in is a frozen pydantic model that is its own configuration.

A table maps a short name to a dotted path, so that a heavy library loads only when it is chosen::

    TABLE = {"coding": "magrpo.rewards.coding:CodingReward"}

A configuration names its plug-in by ``kind``: a name of the table, or ``"package.module:Class"`` for one that lives
outside this project. Every other key is a field of the class.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict

Table = Mapping[str, str]


class ConfigError(ValueError):
    """A configuration, a flag or an input file is unusable. The message names it and the remedy."""


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused, every field documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Plugin(Section):
    """A section that chooses and configures an implementation."""

    kind: str
    """Name of the implementation, or ``package.module:Class`` of your own."""


def choices(name: str, known: Mapping[str, object] | list[str]) -> str:
    """The tail of an error about an unknown name: the nearest match, then all of them."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choices: {', '.join(sorted(known))}"


def resolve(table: Table, name: str) -> type[Plugin]:
    """Import the class that ``name`` stands for.

    Raises:
        ValueError: the name is unknown, or its module or class does not exist; the message lists the choices.
    """
    path = table.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ValueError(f"unknown kind {name!r}: {choices(name, table)}, or 'package.module:Class'")
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load kind {name!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ValueError(f"kind {name!r} is not a subclass of magrpo.registry.Plugin")
    return cls


def build(table: Table, value: Any) -> Any:
    """Turn ``{"kind": name, **fields}`` into the plug-in it describes; anything else passes through unchanged."""
    if not isinstance(value, Mapping):
        return value
    if "kind" not in value:
        raise ValueError(f"needs a key 'kind': {choices('', table)}")
    return resolve(table, str(value["kind"])).model_validate(value)
