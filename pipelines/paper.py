"""What arXiv 2508.04652 reports for two agents that write code, to set beside our own figures of the same tasks.

Its models are Qwen2.5-Coder: one of 7B in the first row, two of 3B in the others. The figures are quoted at second
hand. Speed is in tokens a second, all else in percent of the maximum; what is not given is absent.
"""

from __future__ import annotations

from collections.abc import Mapping

TASKS = ("humaneval", "coophumaneval")
"""Problem sets of which the paper speaks, by ``problems.kind``."""
QUANTITIES = ("tokens_per_s", "structure", "syntax", "tests", "cooperation", "return")

PAPER: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(QUANTITIES, figures, strict=False))
    for name, figures in {
        "single": (73.1, 100.0, 100.0, 64.8),
        "naive": (99.6, 98.4, 96.5, 56.4, 35.1, 63.1),
        "sequential": (97.4, 97.5, 96.3, 55.2, 35.2, 62.5),
        "discussion": (82.5, 98.1, 94.8, 41.2, 30.2, 57.5),
        "one_turn": (190.0, 100.0, 97.8, 61.6, 83.4, 83.7),
        "two_turns": (95.2, 99.9, 97.3, 67.9, 84.9, 85.8),
    }.items()
}
"""By the name of the row: see :data:`pipelines.baselines.BASELINES`."""
