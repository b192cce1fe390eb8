"""``magrpo bench pool``: what the pool of vLLM servers costs over posting the same batch to one server."""

import asyncio
import random
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import aiohttp
import msgspec
from rich.console import Console

from magrpo.algo.stats import seed_interval
from magrpo.config.place import EnginePlace
from magrpo.config.run import load_config
from magrpo.engines.compact_answers import COMPACT
from magrpo.engines.http import make_body, open_session
from magrpo.engines.pool import PooledWeights, PoolEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import find_obstacle
from magrpo.engines.vllm_place import make_jobs
from magrpo.fleets import Job
from magrpo.fleets.local import LocalFleet, LocalProcess
from magrpo.model.host import EngineHost
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.plugins import ConfigError
from magrpo.stages.probe import compute_probes, write_probes
from magrpo.types import Request, SamplingParams
from pipelines.arguments import Positive, locate_config

AIM = 0.05
"""Overhead that the pool may have, as a fraction."""
GROUP_SIZE = 8
_PROMPT_TOKENS = 48


def bench_pool(*, completions: Positive = 256, tokens: Positive = 96, repetitions: Positive = 9) -> int:
    """Start a vLLM server with the embedded model, sample one batch alternately in both ways, and print the ratio.

    Args:
        completions: Completions in the batch, all in flight at once.
        tokens: Tokens per completion.
        repetitions: Pairs of measurements, at least 3.
    """
    config = load_config(locate_config("embedded"), [])
    lineup = Lineup.open(config.agents, config.model, config.lora)
    if obstacle := find_obstacle(lineup.device.type):
        raise ConfigError(f"bench pool: {obstacle}")
    uses_cuda = lineup.device.type == "cuda"
    place = EnginePlace(servers=1, gpus=1 if uses_cuda else 0, max_batch=completions)
    with tempfile.TemporaryDirectory(prefix="magrpo-pool-") as folder:
        policy = Policy.of(lineup, seed=0)
        weights = policy.save(Path(folder))
        write_probes(Path(folder), compute_probes(policy))
        fleet = _NotingFleet()
        logs = Path(folder) / "logs"
        host = replace(EngineHost.of(policy), fleet=fleet, place=place, shares_gpus=False, logs=logs)
        key = secrets.token_urlsafe(32)
        try:
            engine = PoolEngine(host, make_jobs(host, VllmEngine().options, key), key)
            try:
                served, [server] = engine.serve(0, weights), fleet.started
                requests = make_requests(lineup, completions, tokens)
                bodies, url = encode_bodies(lineup, served, requests), f"http://{server.host}:{server.port}"
                pairs = time_by_turns(
                    lambda: served.generate(requests),
                    lambda: asyncio.run(post_batch(url, key, bodies)),
                    max(repetitions, 3),
                )
            finally:
                engine.close()
        finally:
            fleet.close()
    print_ratio(pairs, f"{completions} completions of {tokens} tokens")
    return 0


def make_requests(lineup: Lineup, completions: int, tokens: int) -> list[Request]:
    """Random prompts, each with :data:`GROUP_SIZE` siblings for each agent, that are not stopped early as a rule."""
    rng, sampling = random.Random(0), SamplingParams(max_new_tokens=tokens)
    requests: list[Request] = []
    while len(requests) < completions:
        for agent in lineup.agents:
            words = [rng.randrange(10, 200) for _ in range(_PROMPT_TOKENS)]
            seeds = range(len(requests), len(requests) + GROUP_SIZE)
            requests += [Request(agent, tuple(words), sampling, seed) for seed in seeds]
    return requests[:completions]


def encode_bodies(lineup: Lineup, served: PooledWeights, requests: Sequence[Request]) -> list[bytes]:
    """What the pool posts for ``requests``."""
    bodies = []
    for request in requests:
        named = served.by_agent[request.agent]
        assert named is not None
        bodies.append(msgspec.json.encode(make_body(named.name, request, lineup.stop_token_ids(request.agent))))
    return bodies


async def post_batch(server: str, key: str, bodies: Sequence[bytes]) -> None:
    """Post all bodies at once, and do nothing with the answers. Raises aiohttp.ClientResponseError."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    async def post(session: aiohttp.ClientSession, body: bytes) -> None:
        async with session.post(server + COMPACT, data=body, headers=headers, raise_for_status=True) as answer:
            await answer.read()

    async with open_session() as session:
        await asyncio.gather(*(post(session, body) for body in bodies))


def time_by_turns(
    through_pool: Callable[[], object], plainly: Callable[[], object], repetitions: int
) -> list[tuple[float, float]]:
    """Seconds of both ways, in pairs of which every other begins with the second; one pair before warms up."""
    pairs, seconds = [], [0.0, 0.0]
    for repetition in range(repetitions + 1):
        for way in (0, 1) if repetition % 2 else (1, 0):
            started = perf_counter()
            (through_pool, plainly)[way]()
            seconds[way] = perf_counter() - started
        pairs.append((seconds[0], seconds[1]))
    return pairs[1:]


def print_ratio(pairs: Sequence[tuple[float, float]], batch: str) -> None:
    """Print the median times of both ways, their ratio and its interval."""
    ratios = [pool / plain for pool, plain in pairs]
    interval = seed_interval(ratios)
    pool, plain = (median(pair[way] for pair in pairs) for way in (0, 1))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{batch}, {len(pairs)} pairs, medians: {pool:.3f} s through the pool, {plain:.3f} s posted directly")
    console.print(
        f"ratio: median {median(ratios):.3f}, mean {interval.mean:.3f} "
        f"(95 %: {interval.low:.3f} to {interval.high:.3f}); the target is at most {1 + AIM:g}"
    )


class _NotingFleet(LocalFleet):
    """A fleet that says what it started."""

    def start(self, job: Job) -> Sequence[LocalProcess]:
        self.started = super().start(job)
        return self.started
