"""The engine ``auto``: chooses the engine that suits the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magrpo.config.place import EnginePlace
from magrpo.engines.transformers import TransformersEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_obstacle
from magrpo.plugins import Plugin

if TYPE_CHECKING:
    import torch

    from magrpo.interfaces import Engine
    from magrpo.model.host import EngineHost


class AutoEngine(Plugin):
    """``vllm`` for servers of a place, or on CUDA if it is installed, else ``transformers``; each with its defaults."""

    kind: str = "auto"

    def choose_engine(self, device: torch.device, place: EnginePlace) -> TransformersEngine | VllmEngine:
        """The engine plug-in for ``device`` and ``place``."""
        is_vllm = place.is_remote or (device.type == "cuda" and not find_obstacle("cuda"))
        return VllmEngine() if is_vllm else TransformersEngine()

    def open(self, host: EngineHost) -> Engine:
        return self.choose_engine(host.lineup.device, host.place).open(host)
