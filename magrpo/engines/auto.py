"""The engine ``auto``: chooses the engine that suits the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magrpo.engines.transformers import TransformersEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_vllm_obstacle
from magrpo.plugins import Plugin

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
    from magrpo.interfaces import Engine
    from magrpo.model.host import EngineHost


class AutoEngine(Plugin):
    """``vllm`` on CUDA if it is installed and takes the agents, else ``transformers``; with their defaults."""

    kind: str = "auto"

    def choose_engine(
        self, agents: Iterable[AgentConfig], model: ModelConfig, lora: LoraConfig, device: torch.device
    ) -> TransformersEngine | VllmEngine:
        """The engine plug-in for ``agents`` on ``device``."""
        takes_vllm = device.type == "cuda" and not find_vllm_obstacle(agents, model, lora, device)
        return VllmEngine() if takes_vllm else TransformersEngine()

    def open(self, host: EngineHost) -> Engine:
        lineup = host.lineup
        return self.choose_engine(lineup.configs, lineup.model, lineup.lora, lineup.device).open(host)
