"""Plug-ins: the way to extend the project, and the tables that name them.

A plug-in is a frozen pydantic model that is its own configuration. A configuration names it by ``kind``: a name from
the tables, or ``"package.module:Class"`` for a class outside this project. Every other key is a field of the class. The
tables hold dotted paths, so that a heavy library is loaded only if its plug-in is chosen.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationInfo, field_validator

from magrpo.errors import list_choices, quote_error, quote_value

TABLES: Mapping[str, Mapping[str, str]] = {
    "problems": {
        "coopcode": "magrpo.problems.coopcode:CoopCode",
        "relay": "magrpo.problems.relay:Relay",
        "humaneval": "magrpo.problems.humaneval:HumanEval",
        "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
        "humanevalplus": "magrpo.problems.humaneval:HumanEvalPlus",
        "mbpp": "magrpo.problems.mbpp:Mbpp",
        "mbppplus": "magrpo.problems.mbpp:MbppPlus",
        "livecodebench": "magrpo.problems.livecodebench:LiveCodeBench",
        "notes": "magrpo.problems.notes:Notes",
        "tldr": "magrpo.problems.writing:Tldr",
        "arxiv": "magrpo.problems.writing:Arxiv",
        "reasoning_gym": "magrpo.problems.reasoning_gym:ReasoningGym",
    },
    "env": {
        "coding": "magrpo.envs.coding:CodingEnv",
        "solo": "magrpo.envs.coding:SoloEnv",
        "sequential": "magrpo.envs.coding:SequentialEnv",
        "team": "magrpo.envs.coding:TeamEnv",
        "writing": "magrpo.envs.writing:WritingEnv",
        "writing_solo": "magrpo.envs.writing:SoloWritingEnv",
        "writing_sequential": "magrpo.envs.writing:SequentialWritingEnv",
        "relay": "magrpo.envs.relay:RelayEnv",
        "relay_in_turn": "magrpo.envs.relay:RelayInTurnEnv",
        "relay_solo": "magrpo.envs.relay:SoloRelayEnv",
        "program": "magrpo.envs.program:AgentProgram",
    },
    "reward": {
        "coding": "magrpo.rewards.coding:CodingReward",
        "solo": "magrpo.rewards.coding:SoloReward",
        "team": "magrpo.rewards.coding:TeamReward",
        "writing": "magrpo.rewards.writing:WritingReward",
        "writing_solo": "magrpo.rewards.writing:SoloWritingReward",
        "relay": "magrpo.rewards.relay:RelayReward",
        "relay_solo": "magrpo.rewards.relay:RelayReward",
        "returned": "magrpo.rewards.returned:ReturnedReward",
    },
    "sandbox": {
        "none": "magrpo.sandboxes.none:NoSandbox",
        "pool": "magrpo.sandboxes.pool:PoolSandbox",
    },
    "engine": {
        "auto": "magrpo.engines.auto:AutoEngine",
        "transformers": "magrpo.engines.transformers:TransformersEngine",
        "vllm": "magrpo.engines.vllm:VllmEngine",
    },
}
"""The plug-ins of each section of a configuration, by ``kind``."""

MEMBERS: Mapping[str, Sequence[str]] = {
    "problems": ("load",),
    "env": ("num_turns", "roles", "acting", "observe"),
    "reward": ("maxima", "fraction", "passed", "executions", "price"),
    "sandbox": ("open",),
    "engine": ("open",),
}
"""The members that the plug-ins of each section must have (:mod:`magrpo.interfaces`)."""

_UNIMPORTABLE = (
    *(ImportError, SyntaxError, SystemExit, NameError, AttributeError, TypeError, ValueError),
    *(LookupError, ArithmeticError, AssertionError, OSError, RuntimeError),
)
"""Errors that importing a user's module can raise."""


class Section(BaseModel):
    """A part of the configuration: immutable; rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would read true as 1."""
        is_collection = isinstance(value, list | tuple | dict)
        items = (value.values() if isinstance(value, dict) else value) if is_collection else [value]
        found = next((item for item in items if isinstance(item, bool)), None)
        if found is None:
            return value
        types = set(_list_types(cls.model_fields[str(info.field_name)].annotation))
        if is_collection:
            types = {inner for outer in types for arg in get_args(outer) for inner in _list_types(arg)}
        if bool not in types and types & {int, float}:
            raise ValueError(f"must be a number, not {str(found).lower()}")
        return value


def _list_types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation such as ``Literal[2] | list[int] | None`` allows: int, list[int] and None."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for inner in get_args(annotation):
            yield from _list_types(inner)
    else:
        yield annotation


SectionT = TypeVar("SectionT", bound=Section)


class Plugin(Section):
    """A section that chooses and configures an implementation."""

    kind: str
    """Name of the implementation, or ``package.module:Class`` of your own."""


def check_unique(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``values`` if no two are equal; for validators of fields. Raises ValueError."""
    twice = next((value for value, count in Counter(values).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is named more than once")
    return values


def import_plugin(table: Mapping[str, str], kind: str) -> type[Plugin]:
    """Import the class named by ``kind``. Raises ValueError, with the choices, if it cannot be loaded."""
    path = table.get(kind, kind)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ValueError(f"unknown kind {quote_value(kind)}: {list_choices(kind, table)}, or 'package.module:Class'")
    try:
        cls = getattr(import_module(module_name), class_name)
    except _UNIMPORTABLE as error:
        reason = _explain_import(error, module_name, class_name)
        raise ValueError(f"cannot load kind {quote_value(kind)}: {reason}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ValueError(f"kind {quote_value(kind)} is not a subclass of magrpo.plugins.Plugin")
    return cls


def _explain_import(error: BaseException, module_name: str, class_name: str) -> str:
    """Explain why a class could not be imported, with the remedy if its module was not found."""
    place = "must be in the current folder or in one on PYTHONPATH"
    if module_name.endswith(".py"):
        module = quote_value(f"{name_module(module_name)}:{class_name}")
        return f"name the module, {module}, not its file; it {place}"
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        return f"{quote_error(error)}; a module of your own {place}"
    return quote_error(error)


def name_module(file: str) -> str:
    """The name by which the module in ``file`` is imported, from the current folder or, if it is elsewhere, its own."""
    path = Path(file)
    is_below = not path.is_absolute() and ".." not in path.parts
    return ".".join(path.with_suffix("").parts) if is_below else path.stem


def build_plugin(section: str, value: Any) -> Any:
    """Build the plug-in that ``{"kind": name, **fields}`` describes; return anything but a mapping unchanged."""
    if not isinstance(value, Mapping):
        return value
    table = TABLES[section]
    if "kind" not in value:
        raise ValueError(f"needs a key 'kind': {list_choices('', table)}")
    kind = str(value["kind"])
    cls = import_plugin(table, kind)
    if absent := [name for name in MEMBERS[section] if name not in cls.model_fields and not hasattr(cls, name)]:
        raise ValueError(f"kind {quote_value(kind)} cannot be used as [{section}]: it has no {', '.join(absent)}")
    return cls.model_validate(value)


def plugin_field(section: str) -> Any:
    """The type of a configuration field that chooses and configures a plug-in of ``TABLES[section]``."""
    return Annotated[SerializeAsAny[Plugin], BeforeValidator(partial(build_plugin, section))]
