"""Calls a reward for many joint actions: in this process, or in reward processes if the reward allows it.

Its results are checked in the process that calls it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import msgspec

from magrpo.checks.rewards import compute_price, request_executions
from magrpo.interfaces import Reward, RunsElsewhere
from magrpo.process.parent import exit_with_parent
from magrpo.types import Execution, ExecutionReport, JointReward, Problem, Reports, RoleTexts

Item = tuple[Problem, RoleTexts, Reports]
"""A joint action: its problem, the text of each role, and its reports so far."""
MANY = 512
"""Number of joint actions from which starting reward processes is worth while."""
_BLOCK = 64
"""Number of consecutive joint actions in one message."""
ResultT = TypeVar("ResultT")


class RewardProcesses(ProcessPoolExecutor):
    """Processes that call rewards; they start when they are first needed and end with this one, however it ends."""

    def __init__(self, count: int) -> None:
        # Forking a process in which torch has threads may deadlock the child.
        super().__init__(count, get_context("spawn"), exit_with_parent, (os.getpid(),))

    def close(self) -> None:
        self.shutdown(cancel_futures=True)


class _PricingJob(msgspec.Struct):
    """A pickled reward, and the joint actions to call it for."""

    reward: bytes
    items: list[tuple[Problem, dict[str, str], dict[str, ExecutionReport]]]


@dataclass(frozen=True, slots=True)
class Pricing:
    """A reward, and the processes that may call it."""

    reward: Reward
    reward_processes: Executor | None

    @classmethod
    def of(cls, reward: Reward, reward_processes: Executor | None, num_items: int) -> Pricing:
        """``reward_processes`` are left out if the reward does not let them call it, or for few joint actions."""
        declared = isinstance(reward, RunsElsewhere) and reward.runs_elsewhere
        is_own = "runs_elsewhere" in vars(type(reward))
        return cls(reward, reward_processes if declared and is_own and num_items >= MANY else None)

    def list_executions(self, items: Mapping[int, Item]) -> dict[int, Mapping[str, Execution]]:
        """The executions that each joint action still needs, by number."""
        if self.reward_processes is None:
            return {number: request_executions(self.reward, *item) for number, item in items.items()}
        return self._call(_answer_executions, items, list[Mapping[str, Execution]])

    def list_prices(self, items: Mapping[int, Item]) -> dict[int, JointReward]:
        """The price of each joint action, by number."""
        if self.reward_processes is None:
            return {number: compute_price(self.reward, *item) for number, item in items.items()}
        return self._call(_answer_prices, items, list[JointReward])

    def _call(
        self, function: Callable[[bytes], bytes], items: Mapping[int, Item], kind: type[list[ResultT]]
    ) -> dict[int, ResultT]:
        assert self.reward_processes is not None
        blocks: dict[int, list[int]] = {}
        for number in items:
            blocks.setdefault(number // _BLOCK, []).append(number)
        reward = pickle.dumps(self.reward)
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(kind).decode
        messages = [
            encode({"reward": reward, "items": [items[number] for number in numbers]}) for numbers in blocks.values()
        ]
        results: dict[int, ResultT] = {}
        for numbers, answer in zip(blocks.values(), self.reward_processes.map(function, messages), strict=True):
            results |= zip(numbers, decode(answer), strict=True)
        return results


def _answer_executions(message: bytes) -> bytes:
    reward, items = _read_job(message)
    return msgspec.msgpack.encode([request_executions(reward, *item) for item in items])


def _answer_prices(message: bytes) -> bytes:
    reward, items = _read_job(message)
    return msgspec.msgpack.encode([compute_price(reward, *item) for item in items])


def _read_job(message: bytes) -> tuple[Reward, list[Item]]:
    given = msgspec.msgpack.decode(message, type=_PricingJob)
    reward: Reward = pickle.loads(given.reward)
    return reward, list(given.items)
