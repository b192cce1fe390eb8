"""Sampling by this project's own engine, by ``generate`` of transformers, and by vLLM, in turns: tokens per second."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from magrpo.algo.stats import seed_interval
from magrpo.engines.local.decoding import decode_batch, decoding_model, start_padded
from magrpo.engines.local.steps import ModuleStep
from magrpo.engines.transformers import LocalEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_vllm_obstacle
from magrpo.interfaces import Served
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.progress.activity import show_activity
from magrpo.types import Request
from pipelines.benchmarks.turns import run_by_turns

OWN, GENERATE, VLLM = "transformers (this project)", "generate of transformers", "vllm"
MODULES = "transformers, steps through modules"


def compare_engines(policy: Policy, requests: Sequence[Request], weights: Mapping[str, Path], rounds: int) -> None:
    """Print how many tokens per second each engine samples for the same requests, and the ratio of ours to each.

    Args:
        policy: The trainer's policy, which the first two engines sample from, with these weights.
        requests: Requests of all agents with equal sampling parameters.
        weights: The folder of the weights of each agent.
        rounds: Number of times that each engine samples all requests, in turns, after one that warms up.
    """
    console = Console(highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        own = LocalEngine(policy, len(requests)).serve(policy.version, weights)
        ways: dict[str, Callable[[], int]] = {
            OWN: partial(_count_tokens, own, requests),
            MODULES: partial(sample_through_modules, policy, requests),
            GENERATE: lambda: sum(_generate(policy, agent, requests) for agent in policy.agents),
        }
        lineup = policy.lineup
        if obstacle := find_vllm_obstacle(lineup.configs, lineup.model, lineup.lora, lineup.device):
            console.print(f"no row for vllm: {obstacle}", markup=False)
        else:
            with show_activity("starting vLLM"):
                client = stack.enter_context(closing(VllmEngine().open(EngineHost.of(policy))))
                served = stack.enter_context(closing(client.serve(policy.version, weights)))
            ways[VLLM] = partial(_count_tokens, served, requests)
        measured = run_by_turns(list(ways.values()), rounds)
    columns = ([tokens / seconds for seconds, tokens in column] for column in zip(*measured, strict=True))
    rates = dict(zip(ways, columns, strict=True))
    table = Table("engine", "tokens per second", "ours is so many times as fast, 95 %", box=None)
    for name, found in rates.items():
        interval = seed_interval([ours / other for ours, other in zip(rates[OWN], found, strict=True)])
        ratio = "" if name == OWN else f"{interval.mean:.2f}, {interval.low:.2f} to {interval.high:.2f}"
        table.add_row(name, f"{median(found):,.0f}", ratio)
    console.print(table)


def sample_through_modules(policy: Policy, requests: Sequence[Request]) -> int:
    """Sample agent by agent, with every decoding step through the modules of transformers; return number of tokens."""
    start = partial(start_padded, make_step=ModuleStep)
    count = 0
    for agent in policy.agents:
        of_agent = [request for request in requests if request.agent == agent]
        with decoding_model(policy, agent) as model:
            completions = decode_batch(model, of_agent, policy.lineup.stop_token_ids(agent), None, start=start)
        count += sum(len(completion.token_ids) for completion in completions)
    return count


def _count_tokens(served: Served, requests: Sequence[Request]) -> int:
    return sum(len(action.token_ids) for action in served.generate(requests))


def _generate(policy: Policy, agent: str, requests: Sequence[Request]) -> int:
    """Sample the requests of an agent as one batch, padded on the left; return the number of tokens."""
    prompts = [request.prompt_ids for request in requests if request.agent == agent]
    sampling, stop_token_ids = requests[0].sampling, policy.lineup.stop_token_ids(agent)
    longest = max(map(len, prompts))
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(stop_token_ids),
        pad_token_id=stop_token_ids[0],
    )
    ids = torch.tensor([[stop_token_ids[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    is_prompt = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with decoding_model(policy, agent) as model, torch.no_grad():
        generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009  a mixin's, unknown to its type
        sampled = generate(
            ids.to(policy.device), attention_mask=is_prompt.to(policy.device), generation_config=settings
        )
    written = sampled[:, longest:].cpu()
    ends = torch.isin(written, torch.tensor(stop_token_ids)).int()
    return int((ends.cumsum(1) - ends == 0).sum())  # up to the first stop token, which counts
