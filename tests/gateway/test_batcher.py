"""Batches: what waits is computed together, one batch after another, and an end of the stage ends every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from magrpo.gateway.batcher import Batcher

Compute = Callable[[list[int]], Awaitable[list[int]]]


def run_with(
    compute: Compute, use: Callable[[Batcher[int, int]], Coroutine[Any, Any, Any]], *, everyone_waits: bool = True
) -> Any:
    """The result of ``use``, which is given a running batcher."""

    async def run() -> Any:
        batcher: Batcher[int, int] = Batcher(compute, lambda: everyone_waits, 0.001)
        running = asyncio.ensure_future(batcher.run())
        try:
            return await use(batcher)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(run())


async def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


@pytest.mark.parametrize("everyone_waits", [True, False])
def test_items_that_come_together_are_one_batch(everyone_waits: bool) -> None:
    async def use(batcher: Batcher[int, int]) -> list[tuple[int, int]]:
        first = await asyncio.gather(*map(batcher.submit, range(5)))
        return [*first, await batcher.submit(7)]

    results = run_with(double, use, everyone_waits=everyone_waits)
    assert results == [*((0, 2 * item) for item in range(5)), (1, 14)]


def test_items_that_come_during_a_batch_are_the_next() -> None:
    batches = []

    async def use(batcher: Batcher[int, int]) -> list[tuple[int, int]]:
        return list(await asyncio.gather(batcher.submit(1), submit_later(batcher)))

    computing = []

    async def compute(items: list[int]) -> list[int]:
        batches.append(items)
        if len(batches) == 1:
            computing.append(True)
            while len(computing) < 2:
                await asyncio.sleep(0)
        return await double(items)

    async def submit_later(batcher: Batcher[int, int]) -> tuple[int, int]:
        while not computing:
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(batcher.submit(2))
        await asyncio.sleep(0)
        computing.append(True)
        return await waiting

    assert run_with(compute, use) == [(0, 2), (1, 4)]
    assert batches == [[1], [2]]


def test_an_item_that_nobody_waits_for_any_more_disturbs_nobody() -> None:
    async def use(batcher: Batcher[int, int]) -> tuple[int, int]:
        gone = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0)
        gone.cancel()
        return await batcher.submit(2)

    assert run_with(double, use) == (0, 4)


@pytest.mark.parametrize("moment", ["while computing", "before"])
def test_the_end_of_the_stage_ends_every_wait(moment: str) -> None:
    async def run() -> list[BaseException | tuple[int, int]]:
        started = asyncio.Event()

        async def compute(items: list[int]) -> list[int]:
            started.set()
            await asyncio.Event().wait()
            return items

        batcher: Batcher[int, int] = Batcher(compute, lambda: True, 0.001 if moment == "while computing" else 10.0)
        running = asyncio.ensure_future(batcher.run())
        waiting = [asyncio.ensure_future(batcher.submit(1))]
        if moment == "while computing":
            await started.wait()
            waiting.append(asyncio.ensure_future(batcher.submit(2)))
        for _ in range(3):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        waiting.append(asyncio.ensure_future(batcher.submit(3)))
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 300)

    results = asyncio.run(run())
    assert results
    assert all(isinstance(result, ConnectionAbortedError) for result in results)
