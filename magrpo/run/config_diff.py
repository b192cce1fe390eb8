"""Configurations by dotted key: flat tables, differences from the defaults, differences between runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from magrpo.config.run import RunConfig
from magrpo.config.services import hide_secrets
from magrpo.run.store import RunStore

LOCATION_KEYS = ("root", "tracking.uri", "tracking.experiment")
"""Keys that say where a run is recorded and announced; they do not change its results."""


def flatten_config(config: RunConfig) -> dict[str, object]:
    """Return the resolved configuration by dotted key (``train.seed``, ``agents.0.name``), secrets hidden."""
    return flatten_tree(json.loads(config.resolved()))


def flatten_tree(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of nested tables by dotted key, secrets hidden; tables in a list are numbered."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, inner in enumerate(value):
                yield from walk(f"{prefix}.{index}", inner)
        else:
            yield prefix, hide_secrets(prefix, value)

    return dict(walk("", tree))


def read_flat_config(folder: Path) -> dict[str, object]:
    """Read the configuration in a run directory by dotted key, unvalidated, so that other versions' files are readable.

    Raises ConfigError if it is damaged, or is not the configuration of a run.
    """
    return flatten_tree(RunStore(folder.parent, folder.name).config_tree())


def list_changed_values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str | None]]:
    """Yield key, value and default of values that are not the default or have none (None), secrets hidden.

    Keys get ``prefix``.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from list_changed_values(value, f"{key}.")
        elif isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
            for index, item in enumerate(value):
                yield from list_changed_values(item, f"{key}.{index}.")
        elif name == "kind" or field.is_required():
            yield key, str(value), None
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            if value != default:
                yield key, str(hide_secrets(key, value)), str(default)


def format_changed_values(section: BaseModel) -> Iterator[str]:
    """Format what :func:`list_changed_values` yields: ``key = value (default ...)``, or ``key = value``."""
    for key, value, default in list_changed_values(section):
        yield f"{key} = {value}" if default is None else f"{key} = {value} (default {default})"


def list_differing_keys(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys whose values differ between flat configurations, without :data:`LOCATION_KEYS`."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if key not in LOCATION_KEYS and any(config.get(key) != configs[0].get(key) for config in configs)
    ]
