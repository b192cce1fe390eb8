"""The engine ``auto``: chooses the engine that suits the machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from magrpo.engines.transformers import TransformersEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.plugins import Plugin

if TYPE_CHECKING:
    from magrpo.interfaces import Engine
    from magrpo.policy import Policy


class AutoEngine(Plugin):
    """``vllm`` if the policies are on CUDA and vLLM is installed, else ``transformers``; each with its defaults."""

    kind: str = "auto"

    def choose_engine(self, policy: Policy) -> TransformersEngine | VllmEngine:
        """The engine plug-in for ``policy``."""
        installed = importlib.util.find_spec("vllm") is not None
        return VllmEngine() if installed and policy.device.type == "cuda" else TransformersEngine()

    def open(self, policy: Policy) -> Engine:
        return self.choose_engine(policy).open(policy)
