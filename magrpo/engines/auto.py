"""The engine ``auto``: chooses the engine that suits the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magrpo.engines.transformers import TransformersEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_vllm_obstacle
from magrpo.plugins import Plugin

if TYPE_CHECKING:
    import torch

    from magrpo.interfaces import Engine
    from magrpo.model.host import EngineHost


class AutoEngine(Plugin):
    """``vllm`` on CUDA if it is installed, else ``transformers``; each with its defaults."""

    kind: str = "auto"

    def choose_engine(self, device: torch.device) -> TransformersEngine | VllmEngine:
        """The engine plug-in for ``device``."""
        return VllmEngine() if device.type == "cuda" and not find_vllm_obstacle("cuda") else TransformersEngine()

    def open(self, host: EngineHost) -> Engine:
        return self.choose_engine(host.lineup.device).open(host)
