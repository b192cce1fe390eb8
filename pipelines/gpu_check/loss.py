"""Step 4: the loss beside its floor and other libraries, and beside the ceilings of step 2."""

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from magrpo_kernels import bench
from magrpo_kernels.hidden import allocate_logits, slice_chunks
from pipelines.gpu_check.ceilings import find_ceilings
from pipelines.gpu_check.results import Result, Verdict
from pipelines.gpu_check.setting import Ceilings, Setting

VOCABULARY = 151_936
SHAPES = ((16384, 4096), (8192, 2048))
"""Tokens and width."""
BYTES_PER_LOGIT = 24
"""What eager torch needs at most."""


def measure_loss(setting: Setting) -> Iterator[Result]:
    """Measure the shapes with the kernels' benchmark; fewer tokens where memory is short."""
    ceilings = find_ceilings(setting)
    fitting = setting.count_free_bytes() // (BYTES_PER_LOGIT * VOCABULARY) if not setting.is_small else 0
    fitting = 1 << max(fitting, 1).bit_length() - 1
    shapes = [(64, 16)] if setting.is_small else [(min(tokens, fitting), width) for tokens, width in SHAPES]
    for tokens, width in shapes:
        path = setting.folder / f"loss-{tokens}-{width}.json"
        sizes = {"tokens": tokens, "hidden": width, "vocabulary": 500 if setting.is_small else VOCABULARY, "rounds": 5}
        words = [f"--{name}={value}" for name, value in sizes.items()]
        words += [f"--device={setting.device.type}", f"--dtype={str(setting.dtype)[6:]}", f"--json={path}"]
        bench.main(words + (["--no-compile"] if setting.is_small else []))
        yield from _list_results(json.loads(path.read_text(encoding="utf-8")), ceilings)
        torch.compiler.reset()


def _list_results(report: dict[str, Any], ceilings: Ceilings) -> Iterator[Result]:
    args = Namespace(**report["arguments"])
    shape = f"N {args.tokens}, D {args.hidden}"
    for title, (ratio, aim) in report["ratios"].items():
        measured = report["logits in" if title == bench.LOOP else title]
        seconds = measured["medians_s"][measured["ours"]]
        against = {bench.HALF: "the time with no such groups", bench.LOOP: "the loop"}.get(title, "the floor")
        found = f"{1e3 * seconds:.4g} ms, {ratio:.3g} of {against}"
        expected = f"at most {aim:.3g}; {1e3 * expect_seconds(title, args, ceilings):.4g} ms by the ceilings"
        verdict: Verdict = "ok" if ratio <= aim else "missed"
        if args.device == "cpu":  # small tensors say nothing about speed, and little about memory
            verdict = "note"
        yield Result(f"{title}, {shape}", found, expected, verdict, value=1e3 * seconds)
    for title in ("trained head", "frozen head"):
        found_mib, most_mib = report[title]["extra_bytes"] / bench.MIB, expect_bytes(title, args) / bench.MIB
        verdict = "ok" if found_mib <= 1.05 * most_mib else "missed"
        if args.device == "cpu":
            verdict = "note"
        expected = f"at most {most_mib:.0f} MiB"
        yield Result(f"{title}, {shape}: memory", f"{found_mib:.0f} MiB", expected, verdict, value=found_mib)
    for row in report["trained head"]["rows"]:
        if not row["name"].startswith(bench.OURS):
            seconds = report["trained head"]["medians_s"].get(row["name"])
            found = f"not run: {row['skipped']}" if seconds is None else f"{1e3 * seconds:.4g} ms"
            yield Result(f"trained head, {shape}: {row['name']}", found, verdict="note")


def expect_seconds(title: str, args: Namespace, ceilings: Ceilings) -> float:
    """Products at full speed, then two reads and a write of the logits."""
    logits: int = args.tokens * args.vocabulary
    num_products = {"trained head": 3, bench.HALF: 3, "frozen head": 2}.get(title, 0)
    row_s: float = 3 * logits * getattr(torch, args.dtype).itemsize / ceilings.copy_bytes_per_s
    products_s: float = 2 * num_products * logits * args.hidden / ceilings.flops
    return (products_s + row_s) * (0.5 if title == bench.HALF else 1)


def expect_bytes(title: str, args: Namespace) -> int:
    """A chunk of logits, the head's gradient in float32 and in its dtype, the gradient of the hidden states."""
    trains = title == "trained head"
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    parts = slice_chunks(args.tokens, args.vocabulary, device, trains_head=trains)
    with torch.device("meta"):
        weight = torch.empty(args.vocabulary, args.hidden, dtype=dtype)
    logits = allocate_logits(weight, weight, parts)
    chunk: int = logits.shape[0] * logits.stride(0) * dtype.itemsize
    hidden: int = args.tokens * args.hidden * dtype.itemsize
    head: int = args.vocabulary * args.hidden * (4 + dtype.itemsize)
    return chunk + hidden + (head if trains else 0)
