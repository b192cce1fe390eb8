"""Flat configurations: values by dotted key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from magrpo.config import HIDDEN, SECRETS, RunConfig


def flatten(config: RunConfig) -> dict[str, object]:
    """The resolved configuration by dotted key: ``train.seed``, ``agents.0.name``."""
    return flatten_tree(json.loads(config.resolved()))


def flatten_tree(tree: Mapping[str, Any]) -> dict[str, object]:
    """The values of nested tables by dotted key, secrets hidden; a list of tables has numbers for keys."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, inner in enumerate(value):
                yield from walk(f"{prefix}.{index}", inner)
        else:
            yield prefix, value

    flat = dict(walk("", tree))
    return flat | {key: HIDDEN for key in SECRETS if flat.get(key)}
