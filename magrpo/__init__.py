"""Multi-Agent Group Relative Policy Optimization (arXiv 2508.04652).

The names of :mod:`magrpo.library` are names of this package; it is imported when the first of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magrpo.config.run import RunConfig, load_config
    from magrpo.errors import ConfigError
    from magrpo.library import (
        Run,
        Sampler,
        build_config,
        open_engine,
        open_run,
        price_joint_action,
        run_iteration,
        train_run,
    )

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Run",
    "RunConfig",
    "Sampler",
    "build_config",
    "load_config",
    "open_engine",
    "open_run",
    "price_joint_action",
    "run_iteration",
    "train_run",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from magrpo import library  # pydantic, and the plug-ins that a configuration names

    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
