"""Runs tasks of torch side by side on a CPU: each in a thread of its own, with its share of the cores.

The small matrix products of a decoding step gain little from a second core, and when another process holds that core
they wait for it at the end of each product.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")
Stop = Callable[[], bool]
"""Whether a task shall end, because another has failed or the run ends; its result is not used then."""


def run_side_by_side(
    tasks: Sequence[Callable[[Stop], ResultT]], num_threads: int, *, share_nothing: bool
) -> list[ResultT]:
    """The results of tasks, in order, computed on ``num_threads`` cores: one after another unless they share nothing.
    Raises the first error of a task.

    torch takes the number of threads from the calling thread, and for threads that begin later from the last call of
    ``set_num_threads``: it is ``num_threads`` here and afterwards, whatever it was before.
    """
    stopped = Event()
    workers = min(len(tasks), num_threads) if share_nothing else 1
    torch.set_num_threads(num_threads)
    if workers < 2:
        return [task(stopped.is_set) for task in tasks]

    def run_task(task: Callable[[Stop], ResultT]) -> ResultT:
        torch.set_num_threads(num_threads // workers)
        return task(stopped.is_set)

    with ThreadPoolExecutor(workers, "magrpo-decode") as pool:
        futures = [pool.submit(run_task, task) for task in tasks]
        try:
            for done in as_completed(futures):
                done.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)
    return [future.result() for future in futures]
