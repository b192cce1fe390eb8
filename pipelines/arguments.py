"""Argument types shared by several commands, their shell completion, and the lookup of configurations by name."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token, validators
from cyclopts.completion import CompletionContext

from magrpo.config.place import Place, load_place
from magrpo.plugins import ConfigError

CONFIGS = Path(__file__).parent / "configs"
"""Folder of the shipped configurations."""
SCHEMA_FILE = CONFIGS / "schema.json"
"""The JSON schema of configurations, which the shipped ones name in their first line."""


def list_shipped() -> list[str]:
    """Return the names of the shipped configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def locate_config(name: Path | str) -> Path:
    """Locate the file ``name``, or the shipped configuration of that name; else ConfigError with the closest name.

    A missing file in an existing folder is returned, too: :func:`magrpo.config.run.load_config` names its neighbours.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = list_shipped()
    is_name = path.parent == Path() and not path.suffix
    if is_name and path.name in shipped:
        return CONFIGS / f"{path.name}.toml"
    if is_name or not path.parent.is_dir():
        near = difflib.get_close_matches(path.stem, shipped, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{path}: no such file; {hint}shipped configurations: {', '.join(shipped)}")
    return path


def locate_source(run: str, root: Path) -> str:
    """Return the file of a shipped configuration if ``run`` names it, but no run in ``root``; otherwise ``run``."""
    from magrpo.run.store import RunStore  # loads the configuration, which --help does not need

    is_file = Path(run).suffix == ".toml"
    is_shipped = run in list_shipped() and not RunStore(root, run).exists()
    return str(locate_config(run)) if is_file or is_shipped else run


def parse_place(text: str) -> Place:
    """Read the place in the file ``text``; ``none`` means one process on this machine. Raises ConfigError."""
    return Place() if text == "none" else load_place(Path(text))


# ----------------------------------------------------------------------------------------------------------- completion
def complete_runs(context: CompletionContext) -> Iterator[str]:
    """Complete ids of the runs in ``--root``."""
    root = context.get("root")
    for path in Path(root.raw if root and root.raw else "runs").glob("*/config.json"):
        yield path.parent.name


def complete_configs(context: CompletionContext) -> Iterator[str]:
    """Complete names of shipped configurations, then TOML files and folders."""
    yield from list_shipped()
    yield from complete_toml(context)


def complete_places(context: CompletionContext) -> Iterator[str]:
    """Complete ``none``, then TOML files and folders."""
    yield "none"
    yield from complete_toml(context)


def complete_toml(context: CompletionContext) -> Iterator[str]:
    """Complete TOML files and folders."""
    start = context.incomplete.rpartition("/")[2]
    prefix = context.incomplete.removesuffix(start)
    for path in Path(prefix or ".").glob(f"{start}*"):
        if path.suffix == ".toml":
            yield prefix + path.name
        elif path.is_dir() and (start or not path.name.startswith(".")):
            yield f"{prefix}{path.name}/"


def complete_sources(context: CompletionContext) -> Iterator[str]:
    """Complete runs and configurations."""
    yield from complete_runs(context)
    yield from complete_configs(context)


def complete_keys(context: CompletionContext) -> Iterator[tuple[str, str]]:
    """Complete ``section.key=value``, described by the choices of the key or else its default value.

    Reads the shipped schema, because importing the classes would take seconds. Bash splits words at ``=``, so after one
    it is offered only the value.
    """
    config = context.get("config")
    tree: dict[str, Any] = {}
    if config is not None and config.raw:
        tree = tomllib.loads(locate_config(config.raw).read_text(encoding="utf-8"))
    schema = read_schema()
    words = [*(token.value for token in context.argument.tokens), context.incomplete]
    is_split = "=" in words[-2:]
    key = context.incomplete.partition("=")[0]
    if is_split:
        before_sign = words[:-1] if words[-1] == "=" else words[:-2]
        key = before_sign[-1]
    for section, described in schema["properties"].items():
        for name, field in find_properties(schema, section, tree.get(section)).items():
            path = f"{section}.0" if "items" in described else section  # for a list, keys of its first table
            dotted = f"{path}.{name}" if name else section
            if not dotted.startswith(key) or section == "baselines":
                continue
            for value in list_choices_or_default(field):
                if not is_split or dotted == key:
                    yield value if is_split else f"{dotted}={value}", field.get("description", "")


def read_schema() -> dict[str, Any]:
    """Read the shipped JSON schema."""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


def find_properties(schema: dict[str, Any], name: str, chosen: Any) -> dict[str, dict[str, Any]]:
    """Return the schemas of a section's keys, for the kind ``chosen``; without a name, of values outside sections."""
    described = schema["properties"][name]
    described = described.get("items", described)
    reference = described.get("$ref") or described.get("allOf", [{}])[0].get("$ref")
    section = schema["$defs"][reference.rpartition("/")[2]] if reference else described
    for variant in section.get("anyOf", []):
        kind = variant.get("properties", {}).get("kind", {}).get("const")
        if kind is not None and isinstance(chosen, dict) and kind == chosen.get("kind"):
            return dict(variant["properties"])
    properties: dict[str, dict[str, Any]] = section.get("properties", {} if reference else {"": described})
    return properties


def list_choices_or_default(field: dict[str, Any]) -> list[str]:
    """Return the choices of a key, or else its default value; an empty text if it has neither."""
    for form in (field, *field.get("anyOf", [])):
        if "enum" in form:
            return list(map(str, form["enum"]))
        if form.get("type") == "boolean":
            return ["true", "false"]
    default = field.get("default", "")
    return [default if isinstance(default, str) else json.dumps(default)]


# ---------------------------------------------------------------------------------------------------------------- types
def _convert_config(_: type, tokens: Sequence[Token]) -> Path:
    return locate_config(tokens[0].value)


def _convert_place(_: type, tokens: Sequence[Token]) -> Place:
    return parse_place(tokens[0].value)


def _convert_name(_: type, tokens: Sequence[Token]) -> str:
    from magrpo.run.store import check_run_name  # loads the configuration, which --help does not need

    return check_run_name(tokens[0].value, longest=100)


Root = Annotated[Path, Parameter(help="Folder of run directories.")]
ConfigFile = Annotated[Path, Parameter(converter=_convert_config, completer=complete_configs)]
"""A TOML file, or the name of a shipped configuration."""
PlaceFile = Annotated[Path, Parameter(validator=validators.Path(dir_okay=False), completer=complete_toml)]
GivenPlace = Annotated[
    Place,
    Parameter(
        help="Cluster file (TOML): where to run; none: one process.",
        converter=_convert_place,
        completer=complete_places,
        accepts_keys=False,
        negative=(),
    ),
]
"""Place where a run is executed, read from a TOML file, or ``none``."""
RunId = Annotated[str, Parameter(completer=complete_runs)]
RunName = Annotated[str, Parameter(converter=_convert_name)]
"""The name of a new run, sweep or schedule."""
RunOrConfig = Annotated[str, Parameter(completer=complete_sources)]
Overrides = Annotated[
    str, Parameter(help="section.key=value: change one value of the configuration.", completer=complete_keys)
]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, for scripts.")]
Quiet = Annotated[bool, Parameter(alias="-q", negative=(), help="Print only the result, warnings and errors.")]
Verbose = Annotated[bool, Parameter(alias="-v", negative=(), help="Also print a line for every stage.")]
