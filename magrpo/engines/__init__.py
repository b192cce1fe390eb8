"""Engines that generate completions."""

from __future__ import annotations

from magrpo.plugins import ConfigError


class EngineError(RuntimeError):
    """The engine died, ran past its deadline or produced nonsense. The message names the log file if there is one."""


class PromptTooLong(ConfigError):
    """A prompt leaves no room for its completion. Raised before anything is sampled."""
