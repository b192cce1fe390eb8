"""Runs tasks of torch side by side on a CPU: each in a thread of its own, with its share of the cores.

The small matrix products of a decoding step gain little from a second core, and when another process holds that core
they wait for it at the end of each product.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from threading import Event, RLock
from typing import TypeVar

import torch

from magrpo.config.agents import AgentConfig

ResultT = TypeVar("ResultT")
Stop = Callable[[], bool]
"""Whether a task shall end, because another has failed or the run ends; its result is not used then."""

_cores = RLock()


def hold_cores(device: torch.device) -> AbstractContextManager[object]:
    """Let no other thread of this process compute on its CPU during the block; no-op for another device.

    The last bits of a product depend on MKL's number of threads, which ``set_num_threads`` sets for all of them.
    """
    return _cores if device.type == "cpu" else nullcontext()


def count_updated_at_once(trained: Sequence[AgentConfig], device_type: str, num_threads: int) -> int:
    """The number of agents whose gradients one process computes at a time; ``trained``: holders of trained weights.

    Full copies are computed one after another: the gradients of several would need as much memory as the copies.
    """
    adapters_only = all(agent.weights != "full" for agent in trained)
    return max(min(len(trained), num_threads), 1) if device_type == "cpu" and adapters_only else 1


def run_side_by_side(
    tasks: Sequence[Callable[[Stop], ResultT]], num_threads: int, at_once: int, *, in_turn: bool = False
) -> list[ResultT]:
    """The results of tasks, in order, ``at_once`` of them at a time, each on its share of ``num_threads`` cores.
    Raises the first error of a task.

    ``in_turn``: run the tasks one after another, but with the same number of threads each: floating-point sums depend
    on it.

    torch takes the number of threads from the calling thread, and for threads that begin later from the last call of
    ``set_num_threads``: it is ``num_threads`` afterwards, whatever it was before.
    """
    if not tasks:
        return []
    stopped = Event()
    torch.set_num_threads(num_threads // at_once)
    if at_once < 2 or in_turn:
        try:
            return [task(stopped.is_set) for task in tasks]
        finally:
            torch.set_num_threads(num_threads)
    with ThreadPoolExecutor(at_once, "magrpo-compute", torch.set_num_threads, (num_threads // at_once,)) as pool:
        futures = [pool.submit(task, stopped.is_set) for task in tasks]
        try:
            for done in as_completed(futures):
                done.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)
    return [future.result() for future in futures]
