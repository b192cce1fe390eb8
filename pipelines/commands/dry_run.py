"""``magrpo train --dry-run``: the plan of a run and its estimated cost, without training or writing anything."""

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

import torch
from rich.filesize import pick_unit_and_suffix

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.engines.auto import AutoEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_obstacle
from magrpo.interfaces import EnginePlugin, HasMaxBatch, ProbesIsolation
from magrpo.model.lineup import Lineup, device_of, dtype_of
from magrpo.planning.card import check_card, estimate_card
from magrpo.planning.fit import check_place
from magrpo.planning.sizes import KV_CACHE, POLICY, SECOND_POLICY, estimate_disk, estimate_memory, estimate_work
from magrpo.run.config_diff import list_changed_values
from magrpo.run.layout import Step, read_place, read_problems, steps, steps_to_repeat
from magrpo.run.store import RunStore
from magrpo.sandboxes import SandboxError
from magrpo.tracking.connection import tracking_uri
from pipelines.commands.first_prompts import describe_problems

WORK_SECTIONS = "agents, model, lora, problems, env, reward, sandbox, engine, rollout, algo, optim, eval"
"""Sections of the configuration that an earlier run must share for its seconds to count."""


def show_plan(
    config: RunConfig, store: RunStore | None, from_stage: str | None, given_place: Place | None = None
) -> int:
    """Print the plan of a new run, or of resuming ``store``, and return 0. Raises ConfigError if it could not start.

    The models and files of a new run are checked already (:mod:`pipelines.commands.inputs`).
    """
    place = given_place or (read_place(store) if store else Place())
    check_place(config, place)
    # A run for a GPU can be planned on a machine without one.
    device = torch.device("cuda") if config.model.device == "cuda" else device_of(config.model)
    lineup = Lineup.open(config.agents, config.model, config.lora, device)
    prepared = store.find(Step("prepare", 0).folder) if store else None
    committed = read_problems(store.folder(prepared)) if store and prepared else None
    planned = steps(config)
    repeated = steps_to_repeat(store, config, from_stage) if store and from_stage is not None else []
    reused = {step for step in planned if store and step not in repeated and store.find(step.folder) is not None}
    remaining = [step for step in planned if step not in reused]
    first = f"the first to run is {remaining[0]}" if remaining else "none is left to run"
    root = store.path.parent if store else config.root
    for line in (
        *_list_stages(planned),
        *(f"aside    {len(repeated)} committed stages, from {step} on, would be set aside" for step in repeated[:1]),
        f"reused   {len(reused)} of {len(planned)} stages; {first}" if store else "reused   none: a new run",
        *describe_problems(config, lineup, committed),
        *_describe_work(config),
        *_describe_warmup(config),
        *_describe_machine(config, place, device),
        *_describe_disk(config, root),
        _describe_time(config, root, remaining),
        "values that differ from their defaults, or have no default",
        *(f"  {line}" for line in list_changed_values(config)),
        "nothing was trained or written",
    ):
        print(line)
    return 0


def _list_stages(planned: Sequence[Step]) -> Iterator[str]:
    """One line for consecutive iterations with the same stages."""
    yield f"stages   {len(planned)}, in this order"
    rows = [
        (iteration, " ".join(step.title for step in members))
        for iteration, members in groupby(planned, key=lambda step: step.iteration)
    ]
    for stages, same_rows in groupby(rows, key=lambda row: row[1]):
        numbers = [iteration for iteration, _ in same_rows]
        label = "-".join(map(str, dict.fromkeys([numbers[0], numbers[-1]])))
        yield f"  {label:>9}  {stages}"


def _describe_work(config: RunConfig) -> Iterator[str]:
    work = estimate_work(config)
    yield f"tokens   at most {work.tokens} sampled per iteration, in {work.completions} completions"
    if work.programs == 0:
        yield f"sandbox  not needed: {work.joint_actions} joint actions per iteration are scored as texts"
        return
    programs = "as many as the reward requests" if work.programs is None else f"at most {work.programs}"
    yield f"sandbox  {programs} runs per iteration, for {work.joint_actions} joint actions; identical programs run once"
    if isinstance(config.sandbox, ProbesIsolation):
        try:
            yield f"         isolation level {config.sandbox.probe().level}"
        except SandboxError as error:
            yield f"         no isolation level works here: {error}"
    else:
        yield f"         isolation level: known only to {config.sandbox.kind}"


def _describe_warmup(config: RunConfig) -> Iterator[str]:
    if long_warmup := config.optim.describe_long_warmup(config.train.num_iterations):
        yield f"warm-up  {long_warmup}"


def _describe_machine(config: RunConfig, place: Place, device: torch.device) -> Iterator[str]:
    dtype = dtype_of(config.model, device)
    engine = config.engine
    if isinstance(engine, AutoEngine):
        engine = engine.choose_engine(device)
    chosen = f"{engine.kind}{' (chosen by auto)' * (engine is not config.engine)}"
    if place.uses_ray:
        yield f"place    {place.describe()}"
    yield f"engine   {chosen}, on {device.type} in {str(dtype).removeprefix('torch.')}"
    if isinstance(engine, VllmEngine) and (obstacle := find_obstacle(device.type)):
        yield f"         {obstacle}: the run would be refused"
    if device.type == "cuda" and not torch.cuda.is_available() and not place.is_elsewhere:
        yield "         PyTorch sees no CUDA device here: the run would be refused"
    max_batch = engine.max_batch if isinstance(engine, HasMaxBatch) and not isinstance(engine, VllmEngine) else None
    sizes = estimate_memory(config, dtype.itemsize, max_batch)
    sampling = sum(sizes.get(purpose, 0.0) for purpose in (*POLICY, KV_CACHE)) if KV_CACHE in sizes else 0.0
    if place.ranks.count:
        sizes = {purpose: size for purpose, size in sizes.items() if purpose not in (KV_CACHE, SECOND_POLICY)}
    where = " on each rank" if place.ranks.count else ""
    yield f"memory   about {_format_bytes(sum(sizes.values()))}{where}, without libraries"
    for name, size in sizes.items():
        yield f"  {_format_bytes(size):>9}  {name}"
    if isinstance(engine, VllmEngine) and not place.samplers.count:
        of_gpu, of_cpu = f"{engine.memory_frac:.0%} of the GPU", f"{engine.cpu_cache_gib} GiB of cache"
        yield f"             vLLM uses in addition: {of_gpu if device.type == 'cuda' else of_cpu}"
    if place.ranks.count and sampling:
        holder = "on each sampler" if place.samplers.count else "in the run's own process"
        yield f"  {_format_bytes(sampling):>9}  {holder}: a policy for sampling, and its KV cache"
    yield "             estimated from the base models' configurations: AdamW in float32, activations of a full"
    yield "             micro-batch counted on meta tensors, cache without prompts"
    if device.type == "cuda" and not place.uses_ray:
        yield from _describe_card(config, dtype.itemsize, engine)


def _describe_card(config: RunConfig, dtype_bytes: int, engine: EnginePlugin) -> Iterator[str]:
    """Whether the run fits the GPU of this machine, or which it needs. Raises ConfigError if it cannot use this one."""
    use = estimate_card(config, dtype_bytes, engine)
    smallest = use.find_card()
    fitting = "needs more than any GPU has" if smallest is None else f"fits a GPU of {smallest} GiB"
    update, sampling = _format_bytes(use.update), _format_bytes(use.resting)
    yield f"GPU      {fitting}: at most {update} in an update, {sampling} while an engine samples"
    if torch.cuda.is_available():
        _, card = torch.cuda.mem_get_info()
        setting = check_card(config, dtype_bytes, engine, card)
        yield f"         this one has {_format_bytes(card)}" + ": micro-batches will be halved until they fit" * bool(
            setting
        )
        if setting:
            yield f"         to start with ones that fit: {setting}"


def _describe_disk(config: RunConfig, root: Path) -> Iterator[str]:
    """The disk that the whole run takes, beside what is free."""
    copies = tracking_uri(config.tracking, root).startswith("sqlite:")
    sizes = estimate_disk(config, copies=copies)
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    yield f"disk     about {_format_bytes(sum(sizes.values()))} for the whole run; {_format_bytes(free)} free in {root}"
    for name, size in sizes.items():
        yield f"  {_format_bytes(size):>9}  {name}"
    less = config.model_copy(update={"train": config.train.model_copy(update={"keep_weights": "evaluated"})})
    needed = sum(estimate_disk(less, copies=copies).values())
    if needed < sum(sizes.values()):
        yield f'             with train.keep_weights = "evaluated": about {_format_bytes(needed)}'
    if sum(sizes.values()) > free:
        yield "             more than is free: the run would stop; you could resume it after freeing space"


def _describe_time(config: RunConfig, root: Path, remaining: Sequence[Step]) -> str:
    seconds, num_runs = mean_stage_seconds(root, config)
    same = f"the same {WORK_SECTIONS}"
    unknown = sorted({step.title for step in remaining if step.name not in seconds})
    if not num_runs:
        return f"time     unknown, no earlier run in {root} with {same}"
    if unknown:
        return f"time     unknown: no earlier run in {root} with {same} measured {', '.join(unknown)}"
    total = sum(seconds[step.name] for step in remaining)
    earlier = f"{num_runs} earlier run{'s' * (num_runs > 1)}"
    return f"time     about {total:.0f} s in stages: mean of {earlier} in {root} with {same}"


def _format_bytes(size: float) -> str:
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{size / unit:.1f} {suffix}"


def mean_stage_seconds(root: Path, config: RunConfig) -> tuple[dict[str, float], int]:
    """Mean seconds of each stage, by turn, over the runs of ``root`` with the same work; the number of those runs."""
    seconds_by_stage: dict[str, list[float]] = defaultdict(list)
    num_runs, sections = 0, set(WORK_SECTIONS.split(", "))
    same_work = config.model_dump(mode="json", include=sections)
    for path in sorted(root.glob("*/config.json")):
        store = RunStore(root, path.parent.name)
        try:
            is_same = store.config().model_dump(mode="json", include=sections) == same_work
        except ValueError:  # of another version of this project
            continue
        stage_metrics = list(store.stage_metrics()) if is_same else []
        num_runs += bool(stage_metrics)
        for _, stage, metrics in stage_metrics:
            seconds_by_stage[stage].append(metrics.get(f"time/{stage.partition('.')[0]}_s", 0.0))
    return {stage: fmean(seconds) for stage, seconds in seconds_by_stage.items()}, num_runs
