"""Argument types shared by several commands, their shell completion, and the lookup of configurations by name."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token, validators
from cyclopts.completion import CompletionContext

from magrpo.config.place import Place, load_place
from magrpo.errors import ConfigError
from magrpo.files.paths import expand_home

CONFIGS = Path(__file__).parent / "configs"
"""Folder of the shipped configurations."""
STUDIES = Path(__file__).parent / "studies"
"""Folder of the shipped studies."""


def list_shipped(folder: Path = CONFIGS) -> list[str]:
    """Return the names of the shipped configurations, or of the shipped studies."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def locate_config(name: Path | str) -> Path:
    """Locate the file ``name``, or the shipped configuration of that name; else ConfigError with the closest name.

    A missing file in an existing folder is returned, too: :func:`magrpo.config.run.load_config` names its neighbours.
    """
    return _locate_shipped(expand_home(name), CONFIGS)


def locate_study(name: Path | str) -> Path:
    """Locate the study's file ``name``, or the shipped study of that name, like :func:`locate_config`."""
    return _locate_shipped(expand_home(name), STUDIES)


def _locate_shipped(path: Path, folder: Path) -> Path:
    if path.is_file():
        return path
    shipped = list_shipped(folder)
    is_name = path.parent == Path() and not path.suffix
    if is_name and path.name in shipped:
        return folder / f"{path.name}.toml"
    if is_name or not path.parent.is_dir():
        near = difflib.get_close_matches(path.stem, shipped, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        kind = "studies" if folder == STUDIES else "configurations"
        raise ConfigError(f"{path}: no such file; {hint}shipped {kind}: {', '.join(shipped)}")
    return path


def locate_source(run: str, root: Path) -> str:
    """Return the file of a shipped configuration if ``run`` names it, but no run in ``root``; otherwise ``run``."""
    from magrpo.run.store import RunStore  # loads the configuration, which --help does not need

    is_file = Path(run).suffix == ".toml"
    is_shipped = run in list_shipped() and not RunStore(root, run).exists()
    return str(locate_config(run)) if is_file or is_shipped else run


def parse_place(text: str) -> Place:
    """Read the place in the file ``text``; ``none`` means one process on this machine. Raises ConfigError."""
    return Place() if text == "none" else load_place(expand_home(text))


# ----------------------------------------------------------------------------------------------------------- completion
def complete_runs(context: CompletionContext) -> Iterator[str]:
    """Complete ids of the runs in ``--root``."""
    root = context.get("root")
    for path in expand_home(root.raw if root and root.raw else "runs").glob("*/config.json"):
        yield path.parent.name


def complete_configs(context: CompletionContext) -> Iterator[str]:
    """Complete names of shipped configurations, then TOML files and folders."""
    yield from list_shipped()
    yield from complete_toml(context)


def complete_studies(context: CompletionContext) -> Iterator[str]:
    """Complete names of shipped studies, then TOML files and folders."""
    yield from list_shipped(STUDIES)
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


# ---------------------------------------------------------------------------------------------------------------- types
def _convert_path(_: type, tokens: Sequence[Token]) -> Path:
    return expand_home(tokens[0].value)


def _convert_config(_: type, tokens: Sequence[Token]) -> Path:
    return locate_config(tokens[0].value)


def _convert_study(_: type, tokens: Sequence[Token]) -> Path:
    return locate_study(tokens[0].value)


def _convert_place(_: type, tokens: Sequence[Token]) -> Place:
    return parse_place(tokens[0].value)


def _convert_name(_: type, tokens: Sequence[Token]) -> str:
    from magrpo.run.store import check_run_name  # loads the configuration, which --help does not need

    return check_run_name(tokens[0].value, longest=100)


HomePath = Annotated[Path, Parameter(converter=_convert_path)]
"""A path that may begin with ``~``, which shells leave alone in ``--flag=~/folder``."""
Root = Annotated[HomePath, Parameter(help="Folder of run directories.")]
ConfigFile = Annotated[Path, Parameter(converter=_convert_config, completer=complete_configs)]
"""A TOML file, or the name of a shipped configuration."""
StudyFile = Annotated[Path, Parameter(converter=_convert_study, completer=complete_studies)]
"""A TOML file, or the name of a shipped study."""
PlaceFile = Annotated[HomePath, Parameter(validator=validators.Path(dir_okay=False), completer=complete_toml)]
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
"""The name of a new run, study or schedule."""
RunOrConfig = Annotated[str, Parameter(completer=complete_sources)]
Overrides = Annotated[str, Parameter(help="section.key=value: change one value of the configuration.")]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, for scripts.")]
Quiet = Annotated[bool, Parameter(alias="-q", negative=(), help="Print only the result, warnings and errors.")]
Verbose = Annotated[bool, Parameter(alias="-v", negative=(), help="Also print a line for every stage.")]
