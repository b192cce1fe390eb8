"""``magrpo config``: prints keys with types, defaults and meanings from the classes, and whole configurations."""

import json
import re
import shutil
import types
import typing
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.completion import CompletionContext
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from magrpo.config.agents import AgentConfig
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError, list_choices
from magrpo.plugins import TABLES, Plugin, import_plugin
from magrpo.run.config_diff import list_changed_values
from pipelines.arguments import CONFIGS, Overrides, complete_configs, list_shipped, locate_config

TOP = "(top level)"
"""Title for the keys outside sections."""
TITLE = "Keys of a configuration file (CONFIG) and of overrides (section.key=value):"
"""Title for all keys of a configuration."""


def _complete_topics(context: CompletionContext) -> Iterator[str]:
    yield from ["all", "place", *RunConfig.model_fields, *complete_configs(context)]


Topic = Annotated[str, Parameter(completer=_complete_topics)]


def print_schema() -> None:
    """Print the schema, a file that ships with the configurations."""
    print((CONFIGS / "schema.json").read_text(encoding="utf-8"), end="")


def show_config(topic: Topic | None = None, /, *overrides: Overrides) -> int:
    """Print what ``topic`` is about; the exit code is 0.

    Raises ConfigError for an unknown topic, or overrides of anything but a configuration.

    Args:
        topic: What to explain: a section (rollout), a key (train.seed), all or place; or a configuration to print.
    """
    name, _, rest = str(topic).partition(".")
    of_place = (rest.partition(".")[0] if name == "place" else name) in Place.model_fields
    is_file = str(topic).endswith(".toml")
    explains_keys = topic in (None, "all", "place") or ((of_place or name in RunConfig.model_fields) and not is_file)
    if explains_keys and overrides:
        example = f"magrpo config show embedded {overrides[0]}"
        raise ConfigError(f"{overrides[0]}: only a configuration has values to change, as in {example}")
    if topic is None:
        print_wrapped(_format_overview())
    elif topic == "all":
        print_wrapped(format_keys(TITLE, RunConfig))
    elif topic == "place":
        print_wrapped(format_keys("Keys of a place (the cluster file), for --place FILE:", Place))
    elif explains_keys and of_place:
        print_wrapped(_format_topic(topic.removeprefix("place."), _list_sections(Place)))
    elif explains_keys:
        print_wrapped(_format_topic(topic, _list_sections(RunConfig)))
    elif topic in list_shipped() or is_file:
        print("\n".join(_format_values(load_config(locate_config(topic), overrides))))
    elif name == "place":
        raise ConfigError(f"{topic}: unknown key; {list_choices(rest, Place.model_fields)}")
    else:
        raise ConfigError(f"{topic!r}: {list_choices(topic, [*RunConfig.model_fields, *list_shipped()])}")
    return 0


def _format_values(config: RunConfig) -> Iterator[str]:
    """Format the whole configuration as TOML, marking values that differ from their default; secrets are hidden."""
    defaults = {key: default for key, _, default in list_changed_values(config) if default is not None}
    sections, with_secrets = json.loads(config.resolved()), json.loads(config.resolved(secrets=True))
    yield from (f"{key} = {format_value(value)}" for key, value in sections.items() if isinstance(value, str))
    for section, value in sections.items():
        if section == "baselines" or isinstance(value, str):
            continue
        tables, whole = ([found] if isinstance(found, dict) else found for found in (value, with_secrets[section]))
        for index, table in enumerate(tables):
            yield f"\n[[{section}]]" if isinstance(value, list) else f"\n[{section}]"
            for key, entry in table.items():
                dotted = f"{section}.{index}.{key}" if isinstance(value, list) else f"{section}.{key}"
                line = f"# {key}: none" if entry is None else f"{key} = {format_value(entry)}"
                if entry != whole[index][key]:  # what is shown for a secret would be taken for it
                    line = f"# {key}: set, but not shown"
                remark = f"  # default: {defaults[dotted]}" if dotted in defaults else ""
                yield line + remark


def format_value(value: object) -> str:
    """Format a value as TOML, a table in braces."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_format_key(key)} = {format_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False)


def _format_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _format_overview() -> str:
    """Format one line for each section, and how to see more."""
    lines = ["Sections of a configuration:"]
    for name, field in RunConfig.model_fields.items():
        section = AgentConfig if name == "agents" else field.annotation
        meaning = field.description or (section.__doc__ if isinstance(section, type) else "") or ""
        lines.append(f"  {name:<10} {' '.join(meaning.split()).partition('. ')[0].rstrip('.')}")
    lines += [
        "",
        "magrpo config show rollout         explains the keys of a section",
        "magrpo config show train.seed      explains a key",
        "magrpo config show embedded        prints every value of a configuration",
        "magrpo config show all             explains every key",
        "magrpo config show place           explains the keys of a cluster file, for --place",
    ]
    return "\n".join(lines)


def _format_topic(topic: str, sections: list[tuple[str, dict[str, FieldInfo]]]) -> str:
    """Format the keys of one of the ``sections``, or one key."""
    # Messages name keys of one agent agents.0.model or agents.helper.model, and items of a list by their number.
    name, *parts = [part for part in topic.split(".") if not part.isdigit()]
    key = ".".join(parts[1:] if name == "agents" and len(parts) > 1 else parts)
    if name in TABLES and key == "kind":
        meaning = " ".join(str(Plugin.model_fields["kind"].description).split())
        return f"[{name}]\n  kind: {' | '.join(TABLES[name])} | package.module:Class, required\n      {meaning}"
    lines: list[str] = []
    known: dict[str, None] = {}
    for title, fields in sections:
        if title.startswith((f"[{name}]", f"[[{name}]]")) or (title == TOP and name in fields and not key):
            chosen = {k: field for k, field in fields.items() if key in ("", k) and (title != TOP or k == name)}
            known |= dict.fromkeys(fields)
            lines += ["", title, *_format_fields(chosen)] if chosen else []
    if not lines:
        remedy = list_choices(key, list(known)) if known else f"{name} has no keys of its own"
        raise ConfigError(f"{topic}: unknown key; {remedy}")
    return "\n".join(lines[1:])


def format_keys(title: str, root: type[BaseModel]) -> str:
    """Format one line for each key of ``root`` by section, with its type, default and, below, its meaning."""
    lines = [title]
    for section, fields in _list_sections(root):
        lines += ["", section, *_format_fields(fields)]
    return "\n".join(lines)


def print_wrapped(text: str) -> None:
    """Print lines broken between words at the terminal's width, without backticks around names."""
    width = min(shutil.get_terminal_size().columns, 100)
    for line in text.replace("``", "").splitlines():
        column = re.match(r" *(?:\w+ {2,})?", line)
        indent = " " * (len(column[0]) if column else 0)
        print("\n".join(wrap(line, width, subsequent_indent=indent, break_long_words=False)))


def _format_fields(fields: dict[str, FieldInfo]) -> Iterator[str]:
    """Format a line for each key with its type and default, and its meaning below."""
    for key, field in fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = ""
        if field.is_required():
            shown = ", required"
        elif isinstance(default, tuple):
            shown = f" = {list(default)}"
        elif default is not None:
            shown = f" = {default}"
        yield f"  {key}: {_format_type(field.annotation)}{shown}"
        if field.description:
            yield f"      {' '.join(field.description.split())}"


def _list_sections(root: type[BaseModel]) -> list[tuple[str, dict[str, FieldInfo]]]:
    """The keys outside sections, then every section with its keys; a plug-in appears once for each kind."""
    sections: list[tuple[str, dict[str, FieldInfo]]] = []
    top: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        if name == "agents":
            sections.append(("[[agents]]", AgentConfig.model_fields))
        elif name in TABLES:
            for kind in TABLES[name]:
                fields = import_plugin(TABLES[name], kind).model_fields
                sections.append((f'[{name}] kind = "{kind}"', {key: fields[key] for key in fields if key != "kind"}))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((f"[{name}]", field.annotation.model_fields))
        else:
            top[name] = field
    return [(TOP, top), *sections]


def _format_type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        return _format_type(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_format_type(arg) for arg in args)
    if origin is tuple:
        return f"list of {_format_type(args[0])}"
    if annotation is types.NoneType:
        return "none"
    if annotation is SecretStr:
        return "str"
    return str(getattr(annotation, "__name__", annotation)).lower().replace("path", "folder")
