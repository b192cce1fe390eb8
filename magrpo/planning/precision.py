"""Chooses the precision of a run on a CPU, for ``model.dtype = "auto"``."""

from collections.abc import Callable

from magrpo.config.run import RunConfig
from magrpo.model.lineup import device_of
from magrpo.model.rounding import measure_speed_up
from magrpo.planning.sizes import read_base_model

LARGE = 50_000_000
"""Parameters of a base from which on its matrix products take most of the time."""
WORTHWHILE = 1.5
"""Speed-up of the products from which on ``mixed`` is chosen."""


def settle_dtype(
    config: RunConfig, say: Callable[[str], None], measure: Callable[[], float] = measure_speed_up
) -> RunConfig:
    """The configuration with the faster precision of this processor for ``model.dtype = "auto"``.

    Unchanged on a GPU, with another engine than this project's, and unless an adapter is on a large base of a family
    for which the gain was measured. ``say`` is called with a line that gives the reason;
    ``measure`` returns how many times as fast as in float32 this processor multiplies in bfloat16. Raises ConfigError
    if the configuration of a base model cannot be read.
    """
    is_open = config.model.dtype == "auto" and config.engine.kind in ("auto", "transformers")
    if not is_open or config.model.device == "cuda" or device_of(config.model).type != "cpu":
        return config
    sizes = [read_base_model(agent, config) for agent in config.agents if agent.weights != "full"]
    if not any(size.has_own_steps and size.num_parameters >= LARGE for size in sizes):
        return config
    speed_up = measure()
    dtype = "mixed" if speed_up >= WORTHWHILE else "float32"
    say(f"model.dtype: {dtype}; this processor multiplies in bfloat16 {speed_up:.1f} times as fast as in float32")
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
