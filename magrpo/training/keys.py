"""Keys of steps: digests of everything that an output depends on, by which a committed output is found again.

A key covers the inputs, the sections of the configuration that the stage names, and, where it prompts agents, the texts
that the environment can show them; those of a program are in its files. A section contributes only its differences
from the defaults, and nothing if it has none, so a new option or section at its defaults changes no key. Other code
does not enter keys: neither that of stages nor of plug-ins.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from magrpo.config.run import RunConfig
from magrpo.envs.program import AgentProgram
from magrpo.files.writing import atomic_write
from magrpo.interfaces import ReadsSources
from magrpo.process.environment import shorten_path
from magrpo.run.files import SOURCES
from magrpo.run.manifest import digest
from magrpo.run.steps import Step, steps
from magrpo.run.store import Pointer, RunStore

_ANY = TypeAdapter(Any)
log = logging.getLogger(__name__)


def make_key(config: RunConfig, step: Step, inputs: Sequence[Pointer]) -> str:
    """Compute the key of a step that takes these inputs."""
    names = step.spec.sections + step.spec.extra_sections(config)
    sections = {name: list_changes(getattr(config, name)) for name in names}
    if "train" in sections and config.optim.schedule == "constant":
        # The length of the run matters only to a learning rate that decays.
        sections["train"].pop("num_iterations", None)
        sections["train"].pop("max_tokens", None)
    changed = {name: section for name, section in sections.items() if section}
    # Which problems are left out depends on the length of their prompts.
    reads_prompts = step.spec.shows_prompts or (step.stage == "prepare" and config.rollout.leave_out_long)
    prompts = [read_prompts(config)] if reads_prompts else []
    return digest(Path(step.output).name, step.iteration, changed, [pointer["sha"] for pointer in inputs], *prompts)


def read_prompts(config: RunConfig) -> list[Any]:
    """Return the texts that the environments of the run can show, as plain JSON; for a program those of its files."""
    envs = [row.env for row in config.baselines.rows] or [config.env]
    return [env.read_sources() for env in envs if isinstance(env, ReadsSources)]


def list_changes(value: Any) -> Any:
    """Return ``value`` as plain JSON: for each section its differences from defaults, and the ``kind`` of plug-ins."""
    if isinstance(value, BaseModel):
        defaults = {
            name: field.get_default(call_default_factory=True)
            for name, field in type(value).model_fields.items()
            if name != "kind" and not field.is_required()
        }
        return {
            name: list_changes(chosen) for name, chosen in value if name not in defaults or chosen != defaults[name]
        }
    if isinstance(value, Mapping):
        return {str(key): list_changes(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [list_changes(item) for item in value]
    return _ANY.dump_python(value, mode="json")


def check_sources(store: RunStore, config: RunConfig) -> None:
    """Raise ConfigError if a program's command named a file when the run began that is not found from here.

    Without it the program would look like an edited one.
    """
    if isinstance(config.env, AgentProgram):
        path = store.path / SOURCES
        if not path.exists():
            atomic_write(path, "\n".join(config.env.list_files()).encode())
        config.env.check_files(path.read_text(encoding="utf-8").splitlines())


def set_aside_stale(store: RunStore, config: RunConfig) -> None:
    """Set aside the first output whose key has changed since it was committed, and all outputs after it.

    They would be computed again in any case; set aside, they stay readable. An output that lacks an input is skipped,
    but turns after the end of all episodes have none, as in :mod:`magrpo.training.loop`.

    Raises ConfigError if the files of a program are not found from here.
    """
    check_sources(store, config)
    every = steps(config)
    pointers: dict[str, Pointer] = {}
    ended: set[int] = set()
    left_out: set[str] = set()
    for position, step in enumerate(every):
        if step.belongs_to_turn and step.iteration in ended:
            left_out.add(step.output)
            continue
        inputs = [name for name in step.inputs if name not in left_out]
        if not store.is_committed(step.output) or not all(name in pointers for name in inputs):
            continue
        if store.manifest_of(step.output)["key"] != make_key(config, step, [pointers[name] for name in inputs]):
            stale = [step.output for step in every[position:] if store.is_committed(step.output)]
            folder = store.set_aside(stale)
            log.warning(
                "%s was computed with other prompts or by another version: set aside in %s with all later outputs, "
                "and computed again",
                step,
                shorten_path(folder),
            )
            return
        pointers[step.output] = store.pointer(step.output)
        if step.stage == "rollout" and not store.manifest_of(step.output)["metrics"]["rollout/groups"]:
            ended.add(step.iteration)
