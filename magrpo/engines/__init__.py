"""Engines that generate completions."""

from __future__ import annotations

from magrpo.registry import ConfigError

TABLE = {
    "auto": "magrpo.engines.auto:AutoEngine",
    "transformers": "magrpo.engines.transformers:TransformersEngine",
    "vllm": "magrpo.engines.vllm:VllmEngine",
}


class EngineError(RuntimeError):
    """The engine died, ran past its deadline or produced nonsense. The message names the log file if there is one."""


class PromptTooLong(ConfigError):
    """A prompt leaves no room for its completion. Raised before anything is sampled."""
