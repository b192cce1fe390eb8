"""Sampling from models in this process, without a server.

Begin with :mod:`magrpo.engines.local.decoding`, which completes a batch of prompts token by token.
:mod:`~magrpo.engines.local.steps` computes one decoding step of any model that remembers keys and values,
:mod:`~magrpo.engines.local.llama_steps` a faster one for small Llama and Qwen2 models on a CPU,
:mod:`~magrpo.engines.local.captured_steps` one for a GPU, as a CUDA graph, and
:mod:`~magrpo.engines.local.plain_steps` a slower one for all others. :mod:`~magrpo.engines.local.ways` chooses.
:mod:`~magrpo.engines.local.sampling` draws tokens from logits.
"""
