"""``make bench``: one MAGRPO iteration of this project and of CoMLRL, measured in turns on the same machine."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks import workload
from tests.benchmarks.environment import BenchmarkError, ensure_environment, worker
from tests.benchmarks.parity import largest_difference

SIDES = ("peer", "ours")
TARGETS = {2048: (5.0, 3.0), 32768: (5.0, 4.0)}
"""By vocabulary: how many times faster rollout and update should be."""
PARITY = 1e-5


def main() -> int:
    """Run the benchmark and return 1 if it fails or gradients differ too much, but not if a target is missed."""
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="*", default=list(TARGETS), help="vocabulary sizes to time")
    parser.add_argument("--rounds", type=int, default=3, help="iterations of either side; medians are printed")
    parser.add_argument("--prompts", type=int, default=workload.NUM_PROMPTS, help="prompts of one iteration")
    parser.add_argument("--no-parity", dest="parity", action="store_false", help="do not compare gradients")
    arguments = parser.parse_args()
    try:
        python = ensure_environment()
        print(_setting(), flush=True)
        for vocab_size in arguments.vocab:
            compare(python, vocab_size, arguments.rounds, arguments.prompts)
        return check_parity() if arguments.parity else 0
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1


def compare(python: Path, vocab_size: int, rounds: int, num_prompts: int) -> None:
    """Print medians and ratios. The sides take turns, so that a disturbance of the machine meets both."""
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as name:
        workload.write_model(Path(name), vocab_size)
        with (
            worker("peer", python, Path(name), vocab_size) as peer,
            worker("ours", Path(sys.executable), Path(name), vocab_size) as ours,
        ):
            both = {"peer": peer, "ours": ours}
            resident = {side: both[side].ask("memory")[0] for side in SIDES}
            for side in SIDES:
                both[side].ask("iterate", 2)  # warm-up
            times: dict[str, list[list[float]]] = {side: [] for side in SIDES}
            for _ in range(rounds):
                for side in SIDES:
                    times[side].append(both[side].ask("iterate", num_prompts))
            peak = {side: both[side].ask("memory")[1] for side in SIDES}
    print(f"\nvocabulary {vocab_size}, {rounds} rounds of {num_prompts} prompts      CoMLRL      magrpo     ratio")
    targets = TARGETS.get(vocab_size)
    for row, phase in enumerate(("rollout", "update")):
        medians = {side: statistics.median(one[row] for one in times[side]) for side in SIDES}
        spread = ", ".join(
            f"{min(one[row] for one in times[s]):.2f}..{max(one[row] for one in times[s]):.2f}" for s in SIDES
        )
        ratio = medians["peer"] / medians["ours"]
        goal = "" if targets is None else f"  (target {targets[row]:g}: {'met' if ratio >= targets[row] else 'MISSED'})"
        print(f"  {phase:20} {medians['peer']:9.2f} s {medians['ours']:9.2f} s {ratio:8.2f}x{goal}  range {spread}")
    grown = {side: peak[side] - resident[side] for side in SIDES}
    for label, held in (("peak memory", peak), ("of it above start", grown)):
        print(f"  {label:20} {_mib(held['peer'])} {_mib(held['ours'])} {held['peer'] / held['ours']:8.2f}x", flush=True)


def check_parity() -> int:
    """Print how far our gradient is from CoMLRL's; 1 if it is too far."""
    differences = largest_difference()
    print("\ngradient on the same completions, largest difference over largest element:", end="")
    print("".join(f"  {agent} {value:.1e}" for agent, value in differences.items()), f" (at most {PARITY:g})")
    return int(max(differences.values()) > PARITY)


def _setting() -> str:
    """Two lines on what timings depend on: the machine and its load, the library versions and the workload's sizes."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, {platform.machine()}; load averages before the start {load}; "
        f"torch {version('torch')}, transformers {version('transformers')}, float32\n"
        f"{len(workload.AGENTS)} agents, all weights trained; prompts of "
        f"{workload.PROMPT_TOKENS} tokens, G = {workload.GROUP_SIZE}, {workload.NEW_TOKENS} new tokens"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:7.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
