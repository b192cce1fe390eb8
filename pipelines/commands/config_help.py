"""The help text on the keys of a configuration: types, defaults and meanings, read from the classes."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from magrpo.config import AgentConfig, RunConfig
from magrpo.plugins import TABLES, import_plugin


def format_config_help() -> str:
    """One line for each key: ``section.key  type  default``, and its meaning under it."""
    lines = ["Keys of a configuration, for CONFIG and for section.key=value:"]
    for section, fields in _list_sections():
        lines += ["", section]
        for key, field in fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            shown = "" if default is None else f" = {list(default) if isinstance(default, tuple) else default}"
            lines.append(f"  {key}: {_format_type(field.annotation)}{', required' if field.is_required() else shown}")
            if field.description:
                lines.append(f"      {' '.join(field.description.split())}")
    return "\n".join(lines)


def _list_sections() -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """Every section with its keys; a plug-in section appears once for each kind."""
    top: dict[str, FieldInfo] = {}
    for name, field in RunConfig.model_fields.items():
        if name == "agents":
            yield "[[agents]]", AgentConfig.model_fields
        elif name in TABLES:
            for kind in TABLES[name]:
                fields = import_plugin(TABLES[name], kind).model_fields
                yield f'[{name}] kind = "{kind}"', {key: field for key, field in fields.items() if key != "kind"}
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"[{name}]", field.annotation.model_fields
        else:
            top[name] = field
    yield "(top level)", top


def _format_type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
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
