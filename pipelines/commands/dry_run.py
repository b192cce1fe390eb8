"""``magrpo train --dry-run``: what a run would do and take. Nothing is trained or written, Prefect is not started."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from pathlib import Path

import torch

from magrpo.config import RunConfig
from magrpo.config_diff import list_changed_values
from magrpo.engines.auto import AutoEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.interfaces import HasMaxBatch, ProbesIsolation, SandboxPlugin
from magrpo.layout import Step, steps, steps_to_repeat
from magrpo.policy import Policy, device_of, dtype_of
from magrpo.sandboxes import SandboxError
from magrpo.store import RunStore
from pipelines.commands.estimate import SAME, measured, memory, work_of

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_plan(config: RunConfig, store: RunStore | None, from_stage: str | None) -> int:
    """Print the plan of a new run, or of going on with ``store``; the exit code is 0.

    Raises:
        ConfigError: the run could not start like this.
    """
    every = steps(config)
    again = steps_to_repeat(store, config, from_stage) if store is not None and from_stage is not None else []
    reused = {s for s in every if store is not None and s not in again and store.find(s.folder) is not None}
    rest = [step for step in every if step not in reused]
    root = store.path.parent if store is not None else config.root
    for line in (
        *_stages(every),
        *_reuse(every, reused, again, store),
        *_work(config),
        *_machine(config),
        *_time(config, root, rest),
        *_changed(config),
        "nothing was trained or written",
    ):
        print(line)
    return 0


def _stages(every: Sequence[Step]) -> Iterator[str]:
    """Iterations that do the same on one line."""
    yield f"stages   {len(every)}, in this order"
    rows = [
        (iteration, " ".join(step.title for step in members))
        for iteration, members in groupby(every, key=lambda step: step.iteration)
    ]
    for stages, alike in groupby(rows, key=lambda row: row[1]):
        numbers = [iteration for iteration, _ in alike]
        label = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        yield f"  {label:>9}  {stages}"


def _reuse(
    every: Sequence[Step], reused: AbstractSet[Step], again: Sequence[Step], store: RunStore | None
) -> Iterator[str]:
    if store is None:
        yield "reused   none, a new run"
        return
    if again:
        yield f"aside    {len(again)} committed stages, from {again[0]} on, would be set aside"
    left = next((str(step) for step in every if step not in reused), None)
    first = "none is left to run" if left is None else f"the first to run is {left}"
    yield f"reused   {len(reused)} of {len(every)} stages; {first}"


def _work(config: RunConfig) -> Iterator[str]:
    work = work_of(config)
    yield f"tokens   at most {work.tokens} sampled an iteration, in {work.completions} completions"
    if work.programs == 0:
        yield f"sandbox  none is needed: {work.joint_actions} joint actions an iteration are judged as texts"
        return
    programs = "as many as the reward asks for" if work.programs is None else f"at most {work.programs}"
    yield f"sandbox  {programs} runs an iteration, for {work.joint_actions} joint actions; equal programs run once"
    yield f"         {_level(config.sandbox)}"


def _machine(config: RunConfig) -> Iterator[str]:
    # A run for a GPU can be planned where there is none.
    device = torch.device("cuda") if config.model.device == "cuda" else device_of(config.model)
    dtype = dtype_of(config.model, device)
    engine = config.engine
    if isinstance(engine, AutoEngine):
        engine = engine.choose_engine(Policy(device, dtype, "auto"))
    chosen = f"{engine.kind}{' (chosen by auto)' if engine is not config.engine else ''}"
    missing = isinstance(engine, VllmEngine) and importlib.util.find_spec("vllm") is None
    yield f"engine   {chosen}, on {device.type} in {str(dtype).removeprefix('torch.')}{', not installed' * missing}"
    if device.type == "cuda" and not torch.cuda.is_available():
        yield "         PyTorch sees no CUDA device here: the run would be refused"
    max_batch = engine.max_batch if isinstance(engine, HasMaxBatch) and not isinstance(engine, VllmEngine) else None
    sizes = memory(config, dtype.itemsize, max_batch)
    yield f"memory   about {_size(sum(sizes.values()))}, libraries apart"
    for name, size in sizes.items():
        yield f"  {_size(size):>9}  {name}"
    if isinstance(engine, VllmEngine):
        of_gpu, of_cpu = f"{engine.memory_frac:.0%} of the GPU", f"{engine.cpu_cache_gib} GiB of cache"
        yield f"             vLLM takes its own beside: {of_gpu if device.type == 'cuda' else of_cpu}"
    yield "             from the configurations of the base models; AdamW in float32; activations as measured on"
    yield "             Llama models, for a full micro-batch; the cache without prompts"


def _level(sandbox: SandboxPlugin) -> str:
    if not isinstance(sandbox, ProbesIsolation):
        return f"isolation level known only to {sandbox.kind}"
    try:
        return f"isolation level {sandbox.probe().level}"
    except SandboxError as error:
        return f"no isolation level works here: {error}"


def _time(config: RunConfig, root: Path, rest: Sequence[Step]) -> Iterator[str]:
    """Seconds of a stage are those measured; a stage that no earlier run had makes the whole unknown."""
    seconds, runs = measured(root, config)
    same = f"the same {', '.join(SAME)}"
    unknown = sorted({step.title for step in rest if step.name not in seconds})
    if not runs:
        yield f"time     unknown, no earlier run in {root} with {same}"
    elif unknown:
        yield f"time     unknown: no earlier run in {root} with {same} measured {', '.join(unknown)}"
    else:
        total = sum(seconds[step.name] for step in rest)
        earlier = f"{runs} earlier run{'s' * (runs > 1)}"
        yield f"time     about {total:.0f} s in stages, from the means of {earlier} in {root} with {same}"


def _changed(config: RunConfig) -> Iterator[str]:
    yield "values that differ from their defaults, or have none"
    yield from (f"  {line}" for line in list_changed_values(config))


def _size(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}"
