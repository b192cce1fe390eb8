"""Builds the JSON schema of configuration files, which ships as ``pipelines/configs/schema.json`` for editors."""

import json
from collections.abc import Mapping
from typing import Any

from magrpo.config.run import RunConfig
from magrpo.plugins import TABLES, import_plugin


def format_schema() -> str:
    """Return the schema as text."""
    return json.dumps(build_schema(), indent=1) + "\n"


def build_schema() -> dict[str, Any]:
    """Build the schema of a whole configuration; a plug-in's section allows the keys of the kind that it names."""
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    for section in TABLES:
        variants, inner = _list_variants(section)
        definitions.update(inner)
        definitions[section] = {"type": "object", "required": ["kind"], "anyOf": variants}
    for owner in (schema, definitions["BaselineRow"]):
        for section in TABLES.keys() & owner["properties"].keys():
            described = owner["properties"][section].get("description", "")
            owner["properties"][section] = {"allOf": [{"$ref": f"#/$defs/{section}"}], "description": described}
    del definitions["Plugin"]
    cleaned: dict[str, Any] = _clean(schema)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Configuration of magrpo", **cleaned}


def _list_variants(section: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the schemas of a section's kinds, one for user-defined classes, and the definitions that they use."""
    variants: list[dict[str, Any]] = []
    inner: dict[str, Any] = {}
    for kind in TABLES[section]:
        variant = import_plugin(TABLES[section], kind).model_json_schema()
        inner |= variant.pop("$defs", {})
        variant["properties"]["kind"] = {"const": kind, "description": variant["description"]}
        variants.append(variant)
    own = "Your own class: package.module:Class. The other keys are its fields."
    kind_of_own = {"type": "string", "pattern": "^[^:]+:[^:]+$", "description": own}
    return [*variants, {"type": "object", "properties": {"kind": kind_of_own}, "required": ["kind"]}], inner


def _clean(value: Any, *, of_names: bool = False) -> Any:
    """Drop titles that only repeat a name and defaults that TOML cannot hold, and turn descriptions into Markdown.

    ``of_names``: the keys of ``value`` are names of fields or definitions.
    """
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if of_names:
        return {name: _clean(item) for name, item in value.items()}
    cleaned: dict[str, Any] = {}
    for key, item in value.items():
        toml_lacks_default = key == "default" and (item is None or isinstance(item, dict))
        if key != "title" and not toml_lacks_default:
            cleaned[key] = _clean(item, of_names=key in ("properties", "$defs"))
    description = cleaned.get("description")
    if isinstance(description, str):
        cleaned["description"] = " ".join(description.replace("``", "`").split())
    return cleaned
