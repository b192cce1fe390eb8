"""Probes: the log-probabilities that the trainer computed for a few tokens, by which a server proves its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

PROBES = "probe.json"
"""File beside the weights of the agents, in the folder that holds one folder for each of them."""
NUM_TOKENS = 16
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean absolute difference of log-probabilities between trainer and server, by dtype of the base."""


class Probe(msgspec.Struct, frozen=True):
    """A prompt, tokens that follow it, and their log-probabilities at temperature 1 by the weights of one agent."""

    prompt_ids: list[int]
    token_ids: list[int]
    logps: list[float]

    def measure_gap(self, logps: list[float]) -> float:
        """Mean absolute difference between ``logps`` and those of the trainer, in nats; infinite if it is no number."""
        gaps = [abs(theirs - ours) for theirs, ours in zip(logps, self.logps, strict=True)]
        gap = sum(gaps) / len(gaps)
        return gap if gap < float("inf") else float("inf")


def read_probe(folder: Path) -> Probe | None:
    """The probe of the agent whose weights are in ``folder``; None if nobody wrote one, as older versions did not."""
    try:
        text = (folder.parent / PROBES).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(text, type=dict[str, Probe]).get(folder.name)
