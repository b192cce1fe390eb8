"""``--dry-run`` of ``magrpo train`` and ``magrpo resume``: prints the plan of a run and its estimated cost."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from rich.filesize import pick_unit_and_suffix

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_vllm_obstacle
from magrpo.envs.program import AgentProgram
from magrpo.interfaces import EnginePlugin, ProbesIsolation
from magrpo.model.lineup import Lineup, dtype_of
from magrpo.planning.card import choose_engine, count_decoded_at_once, estimate_card, settle_micro_batches
from magrpo.planning.place_check import check_place
from magrpo.planning.precision import settle_dtype
from magrpo.planning.sizes import (
    KV_CACHE,
    POLICY,
    SAMPLING,
    SECOND_POLICY,
    UPDATING,
    count_micro_batch_tokens,
    estimate_disk,
    estimate_memory,
    estimate_work,
    find_planned_device,
    sum_held_at_once,
)
from magrpo.planning.warnings import list_config_warnings
from magrpo.run.config_diff import format_changed_values
from magrpo.run.files import read_place, read_problems
from magrpo.run.rewind import list_remaining_steps, steps_to_repeat
from magrpo.run.steps import Step, steps
from magrpo.run.store import RunStore
from magrpo.sandboxes import SandboxError
from magrpo.tracking.connection import check_tracking, tracking_uri
from pipelines.commands.first_prompts import describe_problems, read_planned_problems
from pipelines.commands.inputs import check_repeated_inputs
from pipelines.commands.plan_lines import format_entry, format_line, print_lines


def show_plan(
    config: RunConfig, store: RunStore | None = None, from_stage: str | None = None, given_place: Place | None = None
) -> int:
    """Print the plan of a new run, or of resuming ``store``, and return 0. Raises ConfigError if it could not start.

    The models and files of a new run are checked already (:mod:`pipelines.commands.inputs`).
    """
    place = given_place or (read_place(store) if store else Place())
    check_tracking(config.tracking, config.root)
    check_place(config, place, store, from_stage)
    prepared = store.find(Step("prepare", 0).output) if store else None
    precision: list[str] = []
    if prepared is None and not place.address:
        config = settle_dtype(config, precision.append)
    device = find_planned_device(config.model)
    lineup = Lineup.open(config.agents, config.model, config.lora, device)
    committed = read_problems(store.folder(prepared)) if store and prepared else None
    planned = steps(config)
    repeated = steps_to_repeat(store, config, from_stage) if store and from_stage is not None else []
    check_repeated_inputs(repeated, config)
    remaining = list_remaining_steps(config, store, from_stage)
    root = store.path.parent if store else config.root
    print_lines(_list_stages(planned))
    if repeated:
        print(format_line("aside", f"{len(repeated)} committed stages, from {repeated[0]} on, would be set aside"))
    print(_describe_reuse(planned, remaining, is_new=store is None))
    problems = read_planned_problems(config, lineup, committed)
    print_lines(describe_problems(config, lineup, problems))
    print_lines(_describe_work(config))
    print_lines(format_line("warning", warning) for warning in list_config_warnings(config))
    print_lines(_describe_engine(config, place, device))
    print_lines(format_line("", line) for line in precision)
    longest_prompt = None if isinstance(problems, str) else problems.longest_prompt
    print_lines(_describe_memory(_settle_micro_batches(config, place, device), place, device, longest_prompt))
    print_lines(_describe_disk(config, root))
    print("values that differ from their defaults, or have no default")
    print("\n".join(f"  {line}" for line in format_changed_values(config)))
    print("nothing was trained or written")
    return 0


def _list_stages(planned: Sequence[Step]) -> Iterator[str]:
    """Yield one line for consecutive iterations with the same stages."""
    yield format_line("stages", f"{len(planned)}, in this order")
    rows = [
        (iteration, " ".join(step.label for step in members))
        for iteration, members in groupby(planned, key=lambda step: step.iteration)
    ]
    for stages, same_rows in groupby(rows, key=lambda row: row[1]):
        numbers = [iteration for iteration, _ in same_rows]
        iterations = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        yield format_entry(iterations, stages)


def _describe_reuse(planned: Sequence[Step], remaining: Sequence[Step], *, is_new: bool) -> str:
    if is_new:
        return format_line("reused", "none: a new run")
    first = f"the first to run is {remaining[0]}" if remaining else "none is left to run"
    return format_line("reused", f"{len(planned) - len(remaining)} of {len(planned)} stages; {first}")


def _describe_work(config: RunConfig) -> Iterator[str]:
    work = estimate_work(config)
    if isinstance(config.env, AgentProgram):
        tokens = (
            f"{work.tokens} sampled per iteration if every agent is asked once, at most {config.env.max_calls} times"
        )
        yield format_line("tokens", f"{tokens} in an episode (env.max_calls)")
    else:
        yield format_line("tokens", f"at most {work.tokens} sampled per iteration, in {work.completions} completions")
    if work.programs == 0:
        yield format_line(
            "sandbox", f"not needed: {work.joint_actions} joint actions per iteration are scored as texts"
        )
        return
    programs = "as many as the reward requests" if work.programs is None else f"at most {work.programs}"
    scored = f"for {work.joint_actions} joint actions; identical programs run once"
    yield format_line("sandbox", f"{programs} runs per iteration, {scored}")
    if isinstance(config.sandbox, ProbesIsolation):
        try:
            yield format_line("", f"isolation level {config.sandbox.probe().level}")
        except SandboxError as error:
            yield format_line("", f"no isolation level works here: {error}")
    else:
        yield format_line("", f"isolation level: known only to {config.sandbox.kind}")


def _describe_engine(config: RunConfig, place: Place, device: torch.device) -> Iterator[str]:
    """The engine, its device and precision, and obstacles that would make the run refuse to start."""
    engine = choose_engine(config, device)
    chosen = engine.kind if engine is config.engine else f"{engine.kind} (chosen by auto)"
    precision = str(dtype_of(config.model, device)).removeprefix("torch.")
    if config.model.dtype == "mixed":
        precision += ", frozen linear layers in bfloat16"
    if place.uses_ray:
        yield format_line("place", place.describe())
    yield format_line("engine", f"{chosen}, on {device.type} in {precision}")
    if isinstance(engine, VllmEngine):
        obstacle = find_vllm_obstacle(config.agents, config.model, config.lora, device)
        if obstacle:
            yield format_line("", f"{obstacle}: the run would be refused")
    if device.type == "cuda" and not torch.cuda.is_available() and not place.is_elsewhere:
        yield format_line("", "PyTorch sees no CUDA device here: the run would be refused")


def _settle_micro_batches(config: RunConfig, place: Place, device: torch.device) -> RunConfig:
    """The configuration with the micro-batches that ``auto`` takes on the GPU here; the fewest if there is none."""
    if device.type != "cuda" or place.ranks.count:
        return config
    card = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return settle_micro_batches(config, dtype_of(config.model, device).itemsize, card)


def _describe_memory(
    config: RunConfig, place: Place, device: torch.device, longest_prompt: int | None
) -> Iterator[str]:
    """The memory of the run by use, and whether it fits the GPU."""
    engine, dtype_bytes = choose_engine(config, device), dtype_of(config.model, device).itemsize
    sizes = estimate_memory(config, dtype_bytes, count_decoded_at_once(engine), longest_prompt)
    sampling = 0.0
    if KV_CACHE in sizes:
        sampling = sum(sizes.get(purpose, 0.0) for purpose in (*POLICY, *SAMPLING))
    where = " on each rank" if place.ranks.count else ""
    samples_elsewhere = bool(place.ranks.count or place.samplers.count)
    if samples_elsewhere:
        sizes = {purpose: size for purpose, size in sizes.items() if purpose not in (*SAMPLING, SECOND_POLICY)}
    most = sum_held_at_once(sizes, overlapping=config.train.lag > 0)
    yield format_line("memory", f"about {_format_bytes(most)}{where} at once, without libraries")
    for purpose, size in sizes.items():
        when = ""
        if purpose in SAMPLING:
            when = ", while the engine samples"
        elif purpose in UPDATING:
            when = ", in an update"
        yield format_entry(_format_bytes(size), f"{purpose}{when}")
    if isinstance(engine, VllmEngine) and not place.samplers.count:
        on_gpu, on_cpu = f"{engine.memory_frac:.0%} of the GPU", f"{engine.cpu_cache_gib} GiB of cache"
        yield format_entry("", f"vLLM uses in addition: {on_gpu if device.type == 'cuda' else on_cpu}")
    if samples_elsewhere and sampling:
        holder = "on each sampler" if place.samplers.count else "in the run's own process"
        yield format_entry(_format_bytes(sampling), f"{holder}: a policy for sampling, and its KV cache")
    tokens = count_micro_batch_tokens(config, longest_prompt)
    yield format_entry("", "estimated from the base models' configurations: AdamW in float32, activations of a")
    prompts = f"prompts of {longest_prompt}" if longest_prompt else "prompts as long as completions"
    yield format_entry("", f"micro-batch of {tokens} tokens counted on meta tensors, {prompts}")
    if device.type == "cuda" and not place.uses_ray:
        yield from _describe_card(config, dtype_bytes, engine, longest_prompt)


def _describe_card(
    config: RunConfig, dtype_bytes: int, engine: EnginePlugin, longest_prompt: int | None
) -> Iterator[str]:
    """The smallest GPU that the run needs, and whether it fits the one of this machine."""
    use = estimate_card(config, dtype_bytes, engine, longest_prompt)
    smallest = use.find_card()
    fitting = "needs more than any GPU has" if smallest is None else f"fits a GPU of {smallest} GiB"
    update, sampling = _format_bytes(use.update_bytes), _format_bytes(use.resting_bytes + use.cache_bytes)
    yield format_line("GPU", f"{fitting}: at most {update} in an update, {sampling} while an engine samples")
    if torch.cuda.is_available():
        _, card = torch.cuda.mem_get_info()
        fits = ""
        if not use.fits(card):
            share = "another engine.memory_frac, " if isinstance(engine, VllmEngine) else ""
            if share and config.engine.kind == "auto":  # which has no such key
                share = 'engine.kind = "vllm" with another engine.memory_frac, '
            fits = f', which is too small; try weights = "lora", {share}or a smaller base model'
        elif use.update_bytes > use.find_room(card):
            fits = ": micro-batches will be halved until they fit; or set optim.gradient_checkpointing = true"
        yield format_line("", f"this one has {_format_bytes(card)}{fits}")


def _describe_disk(config: RunConfig, root: Path) -> Iterator[str]:
    """Show the disk space that the whole run takes, beside the free space."""
    copies = tracking_uri(config.tracking, root).startswith("sqlite:")
    sizes = estimate_disk(config, copies=copies)
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    total, free = sum(sizes.values()), shutil.disk_usage(existing).free
    yield format_line("disk", f"about {_format_bytes(total)} for the whole run; {_format_bytes(free)} free in {root}")
    for name, size in sizes.items():
        yield format_entry(_format_bytes(size), name)
    less = config.model_copy(update={"train": config.train.model_copy(update={"keep_weights": "evaluated"})})
    needed = sum(estimate_disk(less, copies=copies).values())
    if needed < total:
        yield format_entry("", f'with train.keep_weights = "evaluated": about {_format_bytes(needed)}')
    if total > free:
        yield format_entry("", "more than is free: the run would stop; you could resume it after freeing space")


def _format_bytes(size: float) -> str:
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{size / unit:.1f} {suffix}"
