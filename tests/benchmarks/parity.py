"""Whether our gradient is CoMLRL's: on completions that it sampled, without the last token of each, which it drops."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from tests.benchmarks import workload
from tests.benchmarks.environment import ensure_environment, worker

VOCAB_SIZE, NUM_PROMPTS = 2048, 4


def largest_difference() -> dict[str, float]:
    """For each agent, the largest difference of any element of the gradient, over the gradient's largest element.

    CoMLRL's trainer runs one iteration; what its optimizers step on is compared with what ours steps on.
    """
    python = ensure_environment()
    with tempfile.TemporaryDirectory(prefix="magrpo-parity-") as name:
        folder = Path(name)
        workload.write_model(folder, VOCAB_SIZE)
        with worker("peer", python, folder, VOCAB_SIZE) as peer:
            sampled = peer.ask("sample", NUM_PROMPTS)
        with worker("ours", Path(sys.executable), folder, VOCAB_SIZE) as ours:
            ours.ask("train", sampled)
        return {agent: _difference(folder, agent) for agent in workload.AGENTS}


def _difference(folder: Path, agent: str) -> float:
    peer, ours = (load_file(folder / f"{side}-{agent}.safetensors") for side in ("peer", "ours"))
    assert peer.keys() == ours.keys()
    scale = max(float(tensor.abs().max()) for tensor in peer.values())
    assert scale > 0, "the peer's gradient is zero"
    return max(float((peer[key] - ours[key]).abs().max()) for key in peer) / scale
