"""Merging an adapter and its base into one model, for any tool that reads models of transformers."""

from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from magrpo.assets import locate_model
from magrpo.config.agents import AgentConfig
from magrpo.model.lineup import read_stop_tokens
from magrpo.model.policy import load_base_model, save_model


def merge_adapter(agent: AgentConfig, adapter: Path, folder: Path) -> None:
    """Write the agent's base with its ``adapter`` merged into ``folder``, in the precision of the base.

    The sum is computed in float32 and rounded once, so the smallest updates are lost if the base is in bfloat16.
    Raises ConfigError if the base cannot be loaded.
    """
    located = agent.model_copy(update={"model": locate_model(agent.model)})
    base = load_base_model(located, "auto")
    dtype = base.dtype
    model = PeftModel.from_pretrained(nn.Module.to(base, torch.float32), str(adapter))
    save_model(model.merge_and_unload().to(dtype), read_stop_tokens(agent), folder)
