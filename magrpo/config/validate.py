"""From a TOML file and overrides to a validated configuration, with a message that explains every mistake."""

import difflib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from magrpo.config.services import HIDDEN, hide_passwords, hide_secrets
from magrpo.errors import MAX_QUOTED, ConfigError, PluginFailed, list_choices, quote_value
from magrpo.plugins import TABLES, Plugin, Section, SectionT, import_plugin
from magrpo.text import replace_surrogates

_ON_COMMAND_LINE = "on the command line"
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
    changed = [_apply_override(tree, override, model) for override in overrides]
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
        texts: Collection[object] = (value,) if isinstance(value, str) else ()
        if len(path) > _MAX_DEPTH:
            fault = f"nested more than {_MAX_DEPTH} deep"
        elif isinstance(value, Mapping):
            waiting += [((*path, str(key)), item) for key, item in value.items()]
            texts = value.keys()
        elif isinstance(value, list | tuple):
            waiting += [((*path, number), item) for number, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            fault = f"must be a finite number, not {value}"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            fault = "must lie between -2^63 and 2^63"
        if any("\0" in text or replace_surrogates(text) != text for text in map(str, texts)):
            fault = "must not contain null characters or lone surrogates"
        if fault:
            where = _name_source(path, changed, source)
            raise ConfigError(f"{where}: {'.'.join(map(str, path)):.{MAX_QUOTED}}: {fault}")


def _name_source(loc: _Path, changed: Sequence[_Path], source: str) -> str:
    """The source of the value at ``loc``: ``source``, an override, or ``source`` as changed by overrides."""
    if any(loc[: len(path)] == path for path in changed):
        return _ON_COMMAND_LINE
    for path in changed:
        *section, key = path
        # Another kind allows and requires other keys of its section.
        changes_kind = key == "kind" and loc[: len(section)] == tuple(section)
        if changes_kind or path[: len(loc)] == loc:
            return f"{source}, as changed {_ON_COMMAND_LINE}"
    return source


def write_override(key: str, value: object) -> str:
    """Write ``key=value`` with the value as a text, which a folder named like a number or a date must be."""
    return f"{key}={json.dumps(str(value), ensure_ascii=False)}"


def _apply_override(tree: dict[str, Any], override: str, root: type[Section]) -> _Path:
    """Apply ``section.key=value`` to ``tree``; returns the path of the value, with items of lists by number.

    The text ``none`` is None for a key that may be None.
    """
    key, equals, text = override.partition("=")
    shown = f"{key}{equals}{hide_secrets(key, text)}"
    where = f"{_ON_COMMAND_LINE}: {hide_passwords(quote_value(shown))}"
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
            node_key: Any = part
            if isinstance(node, list):
                node_key = _find_item(node, part, ".".join(parts[:depth]), where)
            path = (*path, node_key)
            if depth == len(parts) - 1:
                is_none = value == text.strip() == "none" and _can_be_none(path, tree, root)
                node[node_key] = None if is_none else value
            else:
                node = node[node_key] if isinstance(node, list) else node.setdefault(node_key, {})
    except (TypeError, AttributeError):
        raise ConfigError(f"{where}: {key:.{MAX_QUOTED}} is not a key of the configuration") from None
    return path


def _can_be_none(path: _Path, tree: dict[str, Any], root: type[Section]) -> bool:
    """Whether the key at ``path`` may be None, and has no choice called ``none``."""
    section = _find_section(path[:-1], tree, root)
    if section is None or path[-1] not in section.model_fields:
        return False
    kinds = get_args(section.model_fields[str(path[-1])].annotation)
    return NoneType in kinds and not any("none" in get_args(kind) for kind in kinds)


def _find_item(items: Sequence[Any], part: str, key: str, where: str) -> int:
    """The index of a list item by its number, or by its name if the items are tables with a ``name``."""
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
        found_in = _name_source(item["loc"], changed, source)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {_suggest_key(item['loc'], tree, root)}".removesuffix("; ")
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "literal_error" and (choices := re.findall(r"'([^']+)'", item["ctx"]["expected"])):
            message = f"unknown value {quote_value(item['input'])}; {list_choices(str(item['input']), choices)}"
        elif item["type"] != "value_error":
            value = hide_secrets(where, item["input"])
            section = _find_section(item["loc"], tree, root)
            explained = _explain_type(item["type"], where, value, section, found_in == _ON_COMMAND_LINE)
            message = hide_passwords(explained or f"{message}, got {quote_value(value)}")
        yield f"{found_in}: {where}: {message}" if where else f"{found_in}: {message}"


def _explain_type(error: str, where: str, value: object, section: type[Section] | None, in_shell: bool) -> str:
    """Explain how the value of the key ``where``, of the wrong type, must be written; empty if unknown.

    ``error``: the type of pydantic's error. ``section``: the class of the section that belongs there, if any.
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    quoted = json.dumps(text, ensure_ascii=False)
    quote = shlex.quote if in_shell else str
    plain = isinstance(value, str | int | float | date)
    if error == "tuple_type":
        if section is not None:
            return f"must be a list of tables: begin each of them with [[{where}]]"
        items = text
        if isinstance(value, str):
            parts = ["URL"] if value == HIDDEN else [part.strip(" '\"") for part in value.strip("[] ").split(",")]
            items = ", ".join(json.dumps(part, ensure_ascii=False) for part in parts)
        return f"must be a list: write {quote(f'[{items}]')}" if plain else "must be a list"
    if error in ("string_type", "path_type") and plain:
        return f"must be a text: write {quote(quoted)}, with quotes"
    if error == "model_type" and section is not None:
        if where in TABLES and isinstance(value, str):
            return f"must be a table of keys: write {where}.kind={quoted}"
        return f"must be a table of keys, such as {where}.{next(iter(section.model_fields), 'KEY')}"
    return ""


def _suggest_key(loc: _Path, tree: dict[str, Any], root: type[Section]) -> str:
    """The end of an error message about the unknown key at ``loc``: keys of this or another section, or other kinds.

    Empty for a section in a field of a plug-in whose type does not tell its class.
    """
    key = str(loc[-1])
    names = _list_synonyms(key)
    section = _find_section(loc[:-1], tree, root)
    if section is None:
        return ""
    known, keys = list(section.model_fields), _list_keys(root, tree)
    has_similar = bool(difflib.get_close_matches(key, known, n=1))
    return (
        # The section calls the key by another name.
        _ask_for([name for name in names if name in known])
        # Other kinds of this plug-in have the key.
        or (_describe_kinds(names, [str(loc[0])]) if len(loc) == 2 else "")
        # Other sections have the key.
        or _ask_for(_find_named(names, keys))
        # Kinds of other plug-ins have the key.
        or _describe_kinds(names, list(root.model_fields))
        # Only other sections have a similar key.
        or ("" if has_similar else _ask_for(_find_closest(key, keys)))
        # No other section helps: the keys of this one.
        or list_choices(key, known)
    )


def _list_synonyms(name: str) -> Sequence[str]:
    return name, *SYNONYMS.get(name, ())


def _ask_for(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def _describe_kinds(names: Sequence[str], sections: Sequence[str]) -> str:
    """Name the kinds of the plug-ins in ``sections`` that have the first of ``names`` that any has; empty if none."""
    for name in names:
        found = []
        for section in sections:
            table = TABLES.get(section, {})
            kinds = [repr(kind) for kind in table if name in import_plugin(table, kind).model_fields]
            found += [f"{section}.kind = {' or '.join(kinds)}"] if kinds else []
        if found:
            return f"{'it' if name == names[0] else repr(name)} is a key of {', or of '.join(found)}"
    return ""


def find_keys(name: str, root: type[Section], tree: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose last part is ``name`` or a synonym, else the closest name; keys of agents come last."""
    keys = _list_keys(root, tree)
    return _find_named(_list_synonyms(name), keys) or _find_closest(name, keys)


def _list_keys(root: type[Section], tree: Mapping[str, Any]) -> list[str]:
    """All dotted keys, those of agents last.

    Only plug-ins that ``tree`` chooses have keys. Rows of baselines have none, because a command writes them.
    """
    keys = [key for key, _ in walk_fields(root, tree) if not key.startswith("baselines.rows")]
    return sorted(keys, key=lambda key: re.search(r"\.\d+\.", key) is not None)


def _find_named(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] in names]


def _find_closest(name: str, keys: Sequence[str]) -> list[str]:
    known = {key.rpartition(".")[2] for key in keys}
    return _find_named(difflib.get_close_matches(name, known, n=1), keys)


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


def _find_section(loc: _Path, tree: dict[str, Any], root: type[Section]) -> type[Section] | None:
    """The class of the section at ``loc``, of the plug-in it chooses if it is one; None if no section is found."""
    section: type[Section] | None = root
    for part in loc:
        if section is None:
            return None
        if part in section.model_fields:  # else the number or the name of an item of several sections
            section, _ = _section_class(str(part), section.model_fields[str(part)], tree)
    return section
