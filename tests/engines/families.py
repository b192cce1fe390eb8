"""Tiny configurations of model families, and how the engine ``transformers`` decodes each.

Names are those that transformers gives (``model_type`` in a ``config.json``), with a variant after a space.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.tiny import BOS, EOS, PAD, VOCAB_SIZE

MAX_LENGTH = 64


class Family(NamedTuple):
    """Settings of a tiny model, beside those that all have, and the layers that get adapters."""

    settings: dict[str, Any]
    targets: tuple[str, ...] = ("q_proj", "v_proj")


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_SECOND_IS_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_WINDOW: dict[str, Any] = {"sliding_window": 8, **_SECOND_IS_FULL}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}
_GROUPED: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT: dict[str, Any] = {
    **_GROUPED,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 16),
    "v_head_dim": 24,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": MAX_LENGTH}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH, "n_inner": 96}
_STATES: dict[str, Any] = {"state_size": 8, "time_step_rank": 4}
_FALCON: dict[str, Any] = {"new_decoder_architecture": False}
_QKV = ("query_key_value", "dense")
_LATENT_TARGETS = ("q_b_proj", "kv_b_proj", "o_proj")

PADDED = {
    "afmoe": Family({**_EXPERTS, **_WINDOW, "num_dense_layers": 1}),
    "apertus": Family({}),
    "arcee": Family({}),
    "axk1": Family(_LATENT, _LATENT_TARGETS),
    "biogpt": Family({}),
    "bitnet": Family({}),
    "bloom": Family({"n_layer": 2, "n_head": 2}, _QKV),
    "codegen": Family({"num_attention_heads": 4, "hidden_size": 128, "rotary_dim": 16}, ("qkv_proj", "fc_in")),
    "cohere": Family({}),
    "cohere2": Family(_WINDOW),
    "cohere2_moe": Family(_EXPERTS),
    "cwm": Family(_WINDOW),
    "deepseek_v2": Family(_LATENT, _LATENT_TARGETS),
    "deepseek_v3": Family(_LATENT, _LATENT_TARGETS),
    "diffllama": Family({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "doge": Family({}),
    "dots1": Family({**_EXPERTS, **_GROUPED}),
    "ernie4_5": Family({}),
    "ernie4_5_moe": Family({**_EXPERTS, "moe_k": 2, "moe_layer_start_index": 0}),
    "exaone4": Family(_WINDOW),
    "exaone_moe": Family({**_EXPERTS, **_GROUPED, **_WINDOW}),
    "falcon": Family({**_FALCON, "alibi": False}, _QKV),
    "falcon with ALiBi": Family({**_FALCON, "alibi": True}, _QKV),
    "flex_olmo": Family(_EXPERTS),
    "gemma": Family({}),
    "gemma2": Family(_WINDOW),
    "gemma3_text": Family(_WINDOW),
    "gemma3n_text": Family(
        {
            **_WINDOW,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        }
    ),
    "gemma4_text": Family(
        {
            **_WINDOW,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "global_head_dim": 32,
        }
    ),
    "glm": Family({}),
    "glm4": Family({}),
    "glm4_moe": Family({**_EXPERTS, **_GROUPED}),
    "glm4_moe_lite": Family(_LATENT, _LATENT_TARGETS),
    "gpt2": Family(_GPT, ()),
    "gpt_bigcode": Family(_GPT, ("c_attn", "c_fc")),
    "gpt_neo": Family(
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8}
    ),
    "gpt_neox": Family({}, _QKV),
    "gpt_neox_japanese": Family({}, _QKV),
    "gpt_oss": Family({**_EXPERTS, **_WINDOW}),
    "gptj": Family({**_GPT, "rotary_dim": 16}),
    "granite": Family({}),
    "granite_swa": Family({"sliding_window": 8}),
    "granitemoe": Family(_EXPERTS),
    "granitemoeshared": Family({**_EXPERTS, "shared_intermediate_size": 32}),
    "helium": Family({}),
    "hunyuan_v1_dense": Family({}),
    "hunyuan_v1_moe": Family({**_EXPERTS, "moe_topk": 2}),
    "hy_v3": Family(_EXPERTS),
    "hyperclovax": Family({}),
    "jais2": Family({}),
    "jetmoe": Family({"kv_channels": 32, "num_local_experts": 4, "num_key_value_heads": 2}, ("kv_proj",)),
    "laguna": Family(_EXPERTS),
    "llama": Family({}),
    "llama4_text": Family(
        {
            **_EXPERTS,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        }
    ),
    "longcat_flash": Family(
        {
            **_LATENT,
            "num_layers": 2,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 96,
            "zero_expert_num": 1,
            "moe_topk": 2,
        },
        _LATENT_TARGETS,
    ),
    "mellum": Family(_EXPERTS),
    "mimo_v2_flash": Family(
        {
            **_EXPERTS,
            **_WINDOW,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 24,
            "swa_head_dim": 32,
            "swa_v_head_dim": 24,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
        }
    ),
    "minicpm3": Family(_LATENT, _LATENT_TARGETS),
    "minimax_m2": Family(_EXPERTS),
    "minimax_m3_vl_text": Family(_EXPERTS),
    "ministral": Family(_WINDOW),
    "ministral3": Family({}),
    "mistral": Family({"sliding_window": 8}),
    "mixtral": Family(_EXPERTS),
    "mpt": Family({"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": MAX_LENGTH}, ("Wqkv", "out_proj")),
    "nanochat": Family({}),
    "nemotron": Family({}),
    "olmo": Family({}),
    "olmo2": Family({}),
    "olmo3": Family(_WINDOW),
    "olmoe": Family(_EXPERTS),
    "opt": Family({"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": Family({}, _QKV),
    "phi": Family({}),
    "phi3": Family({}, ("qkv_proj", "o_proj")),
    "phimoe": Family(_EXPERTS),
    "qwen2": Family({}),
    "qwen2_moe": Family(_EXPERTS),
    "qwen3": Family({}),
    "qwen3_moe": Family(_EXPERTS),
    "seed_oss": Family({}),
    "smollm3": Family({}),
    "solar_open": Family({**_EXPERTS, "n_group": 1, "topk_group": 1}),
    "stablelm": Family({}),
    "starcoder2": Family({}),
    "vaultgemma": Family(_WINDOW),
    "xglm": Family({"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 2}),
    # Whenever transformers loads Youtu, it sets the embedding of the padding token to 0.
    "youtu": Family({**_LATENT, "pad_token_id": None}, _LATENT_TARGETS),
}
"""Decoded together whatever the lengths of their prompts, with a copy of keys and values of the engine's own."""

CACHED = {
    "bamba": Family({**_MAMBA, "attn_layer_indices": [1]}),
    "deepseek_v32": Family({**_LATENT, **_INDEXER}, _LATENT_TARGETS),
    "falcon_h1": Family({**_MAMBA, "mamba_d_ssm": 128}),
    "falcon_mamba": Family(_STATES, ("in_proj", "x_proj")),
    "glm_moe_dsa": Family({**_LATENT, **_INDEXER}, _LATENT_TARGETS),
    "granitemoehybrid": Family(
        {**_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
    ),
    "jamba": Family(
        {
            **_EXPERTS,
            **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
            **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        }
    ),
    "kimi_linear": Family(
        {
            **_LATENT,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
        },
        ("o_proj",),
    ),
    "lfm2": Family({"layer_types": ["conv", "full_attention"], "block_ff_dim": 96, "block_multiple_of": 16}),
    "lfm2_moe": Family({**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "mamba": Family(_STATES, ("in_proj", "x_proj")),
    "mamba2": Family({"state_size": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 16, "expand": 2}, ("in_proj",)),
    "nemotron_h": Family(
        {
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
        }
    ),
    "olmo_hybrid": Family(_LINEAR),
    "qwen3_5_moe_text": Family({**_EXPERTS, **_LINEAR}),
    "qwen3_5_text": Family(_LINEAR),
    "qwen3_next": Family({**_EXPERTS, **_LINEAR}),
    "zamba2": Family(
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1],
            "attention_head_dim": 64,
            "attention_hidden_size": 128,
            "num_key_value_heads": 2,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "mamba_headdim": 32,
            "n_mamba_heads": 4,
            "num_mem_blocks": 1,
            "chunk_size": 16,
        }
    ),
}
"""Decoded with the cache of transformers, prompts of one length together."""

WHOLE = {
    "minimax": Family({**_EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    "recurrent_gemma": Family({"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}),
    "rwkv": Family({"attention_hidden_size": 64, "context_length": MAX_LENGTH}, ("key", "value")),
    "xlstm": Family({"num_heads": 2, "num_blocks": 2, "embedding_dim": 64, "chunk_size": 16}, ("q", "v")),
}
"""Computed as whole texts for each token."""


_MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""The text model inside models that read images, too."""
_VISION = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
}
for whole, text in _MULTIMODAL.items():
    group = PADDED if text in PADDED else CACHED
    group[whole] = group[text]


def make_config(name: str, family: Family) -> PreTrainedConfig:
    """The configuration of a tiny model of this family."""
    if name in _MULTIMODAL:
        text_config = make_config(_MULTIMODAL[name], family).to_dict()
        vision_config = None if name == "gemma4" else _VISION
        parts = {"text_config": text_config, "vision_config": vision_config, "eos_token_id": EOS}
        return CONFIG_MAPPING[name](**parts)
    settings = {**_COMMON, **family.settings}
    if name.startswith("falcon") and "new_decoder_architecture" in settings:  # which derives both
        del settings["head_dim"], settings["intermediate_size"]
    return CONFIG_MAPPING[name.partition(" ")[0]](**settings)
