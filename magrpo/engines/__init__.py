"""Engines that generate completions: their errors."""

from __future__ import annotations

from magrpo.plugins import ConfigError


class EngineError(RuntimeError):
    """The engine died, exceeded its deadline or produced invalid output. The message names the log file if any."""


class PromptTooLong(ConfigError):
    """A prompt leaves no room for its completion. Raised before anything is sampled."""
