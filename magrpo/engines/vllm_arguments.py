"""The arguments with which an engine of vLLM is created."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
    from magrpo.model.host import EngineHost

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the maximum rank of an adapter."""

WORKER_EXTENSION = "magrpo.engines.vllm_worker.WorkerExtension"


def find_build_obstacle(device_type: str) -> str:
    """Why vLLM cannot compute on ``device_type``, "cuda" or "cpu", here, and the remedy; empty if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; pip install 'magrpo[vllm]'"
    import torch  # half a second, which a configuration that is only read need not take

    return (
        "this vLLM build needs a GPU; make setup GPU=0 in a clone"
        if device_type == "cpu" and torch.version.cuda
        else ""
    )


def find_vllm_obstacle(
    agents: Iterable[AgentConfig], model: ModelConfig, lora: LoraConfig, device: torch.device
) -> str:
    """Why vLLM cannot sample from ``agents`` on ``device``, and the remedy; empty if it can."""
    if obstacle := find_build_obstacle(device.type):
        return obstacle
    if model.dtype == "mixed":
        return "vLLM has no model.dtype = 'mixed'; set 'float32'"
    if all(agent.weights == "full" for agent in agents):
        return ""
    if lora.rank > MAX_RANKS[-1]:
        return (
            f"lora.rank = {lora.rank}: vLLM takes adapters up to rank {MAX_RANKS[-1]}; choose a smaller one, or "
            "engine.kind = 'transformers'"
        )
    if device.type == "cuda" and model.dtype == "float32":
        return "vLLM has no float32 adapters on CUDA; set model.dtype = 'bfloat16'"
    return ""


def make_arguments(host: EngineHost, agents: Sequence[str], cpu_cache_gib: float) -> dict[str, object]:
    """Keyword arguments of ``vllm.LLM`` for ``agents``, which share a base model."""
    lineup = host.lineup
    arguments: dict[str, object] = {
        "model": lineup.base(agents[0]),
        "dtype": str(lineup.dtype).removeprefix("torch."),
        "max_model_len": lineup.max_length(agents[0]),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if lineup.float32_logits:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if lineup.weights(agents[0]) == "lora":
        arguments |= {
            "enable_lora": True,
            "max_loras": len(agents) * host.num_served,
            "max_cpu_loras": len(agents) * host.num_served,
            "max_lora_rank": next(rank for rank in MAX_RANKS if rank >= lineup.lora.rank),
        }
    if lineup.device.type == "cuda":
        return arguments | {"tensor_parallel_size": host.gpus, "enable_sleep_mode": not host.owns_gpus}
    return arguments | {
        "enforce_eager": True,
        "block_size": 32,  # the default of 128 is longer than most prompts, so that no prefix would be shared
        "kv_cache_memory_bytes": int(cpu_cache_gib * 2**30),
        # With seeds, vLLM 0.32 on CPU cannot split a prompt: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, lineup.max_length(agents[0])),
    }
