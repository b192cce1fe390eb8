"""Scripted stand-ins for what is heavy: small, honest implementations of the Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from magrpo.interfaces import Progress
from magrpo.types import (
    Action,
    Case,
    Execution,
    ExecutionReport,
    JointReward,
    Message,
    Observation,
    PastTurn,
    Problem,
    Request,
)

GIB = 2**30


@dataclass
class FakeGpu:
    """A GPU as ``torch.cuda`` describes it, in bytes. ``is_usable``: PyTorch can use it."""

    is_usable: bool = True
    capability: tuple[int, int] = (9, 0)
    free: int = 79 * GIB
    total: int = 80 * GIB
    empty_cache: Callable[[], None] = lambda: None

    def list_functions(self) -> dict[str, Callable[..., object]]:
        """The functions of ``torch.cuda`` that describe this GPU as it is when they are called, by name."""
        return {
            "is_available": lambda: self.is_usable,
            "device_count": lambda: int(self.is_usable),
            "get_device_name": lambda index=0: "NVIDIA H100",
            "get_device_capability": lambda index=0: self.capability,
            "mem_get_info": lambda index=0: (self.free, self.total),
            "empty_cache": lambda: self.empty_cache(),
        }


@dataclass
class Clock:
    """Stands still but for what a test adds; it can take the place of the module ``time``."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


class ScriptedEngine:
    """Answers each request with ``script(request)``; keeps every batch it was given."""

    def __init__(self, script: Callable[[Request], str]) -> None:
        self.script = script
        self.batches: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], progress: Progress | None = None, version: int = 0) -> list[Action]:
        self.batches.append(list(requests))
        if progress:
            progress(len(requests))
        return [self._answer(request, version) for request in requests]

    def _answer(self, request: Request, version: int) -> Action:
        text = self.script(request)
        ids = tuple(text.encode("utf-8", "replace"))
        return Action(request.agent, text, ids, (-1.0,) * len(ids), "stop", version)

    def serve(self, version: int, weights: Mapping[str, Path]) -> ScriptedWeights:
        return ScriptedWeights(self, version)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ScriptedWeights:
    """Any weights on a scripted engine."""

    engine: ScriptedEngine
    version: int

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        return self.engine.generate(requests, progress, self.version)

    def close(self) -> None: ...


class ScriptedSandbox:
    """Reports ``script(execution)`` as the status of a single case; keeps every batch it was given."""

    level = "none"

    def __init__(self, script: Callable[[Execution], str]) -> None:
        self.script = script
        self.batches: list[list[Execution]] = []

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        self.batches.append(list(executions))
        if progress:
            progress(len(executions))
        statuses = [self.script(execution) for execution in executions]
        return [ExecutionReport(status, (Case(status),), self.level) for status in statuses]

    def close(self) -> None: ...


class LengthEnv:
    """Two blind writers; every observation tells the role and what the agent itself wrote before."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns

    def roles(self) -> tuple[str, ...]:
        return ("helper", "main")

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        own = "".join(f"|{past.texts[agent]}" for past in history)
        return Observation((Message("user", f"{role}:{problem.prompt}{own}"),))


class TurnsEnv(LengthEnv):
    """The helper acts at even turns, main at odd ones; each observation tells the role and all that was written."""

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn % 2],)

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        written = "".join(f"|{text}" for past in history for text in past.texts.values())
        return Observation((Message("user", f"{role}:{problem.prompt}{written}"),))


class PassReward:
    """1 for each of two executions that passes; the second runs only if the first did."""

    maxima: ClassVar[Mapping[str, float]] = {"first": 1.0, "second": 1.0}

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        if "first" not in reports:
            return {"first": Execution(texts["helper"] + texts["main"], "f", problem.test)}
        if "second" not in reports and reports["first"].status == "pass":
            return {"second": Execution(texts["main"], "f", problem.test)}
        return {}

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        parts = {name: float(name in reports and reports[name].status == "pass") for name in self.maxima}
        return JointReward(sum(parts.values()), parts)

    def fraction(self, total: float) -> float:
        return total / 2.0

    def passed(self, reports: Mapping[str, ExecutionReport]) -> bool:
        return "first" in reports and reports["first"].status == "pass"


def render(agent: str, observation: Observation) -> tuple[int, ...]:
    """Token ids of an observation: its bytes."""
    return tuple(b"".join(message.content.encode() for message in observation.messages))
