"""Collects what many episodes wait for into batches, which one thread computes one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_PATIENCE = 10
"""How many times longer a batch waits for new items if some episode does not wait, and may ask for something yet."""


class Batcher(Generic[ItemT, ResultT]):
    """Hands batches to ``compute``, each once no new item has come for ``wait_s`` and ``everyone_waits``."""

    def __init__(
        self,
        compute: Callable[[list[ItemT]], Awaitable[list[ResultT]]],
        everyone_waits: Callable[[], bool],
        wait_s: float,
    ) -> None:
        self._compute, self._everyone_waits, self._wait_s = compute, everyone_waits, wait_s
        self._waiting: list[tuple[ItemT, asyncio.Future[tuple[int, ResultT]]]] = []
        self._arrived = asyncio.Event()
        self._num_batches = 0
        self._end: ConnectionAbortedError | None = None
        """The reason why nothing is computed any more; None while batches are."""

    async def submit(self, item: ItemT) -> tuple[int, ResultT]:
        """Wait for the result of ``item``; returns the number of its batch, too.

        Raises ConnectionAbortedError if there will be none, because :meth:`run` has ended.
        """
        if self._end is not None:
            raise self._end
        future: asyncio.Future[tuple[int, ResultT]] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._arrived.set()
        return await future

    async def run(self) -> None:
        """Compute batches until cancelled; an exception of ``compute`` ends it, too, and every item that waits."""
        batch: list[tuple[ItemT, asyncio.Future[tuple[int, ResultT]]]] = []
        try:
            while True:
                await self._arrived.wait()
                await self._settle()
                batch, self._waiting = self._waiting, []
                self._arrived.clear()
                results = await self._compute([item for item, _ in batch])
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result((self._num_batches, result))
                self._num_batches += 1
        except BaseException as error:  # cancelled, or whatever the engine raises: nobody may wait for ever
            self._end = ConnectionAbortedError(f"the stage ended: {error}".removesuffix(": "))
            for _, future in (*batch, *self._waiting):
                if not future.done():
                    future.set_exception(self._end)
            raise

    async def _settle(self) -> None:
        """Wait until no new item has come for a while."""
        loop = asyncio.get_running_loop()
        count, since = len(self._waiting), loop.time()
        while True:
            await asyncio.sleep(self._wait_s)
            if len(self._waiting) != count:
                count, since = len(self._waiting), loop.time()
            elif self._everyone_waits() or loop.time() - since >= _PATIENCE * self._wait_s:
                return
