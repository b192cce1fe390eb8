"""vLLM servers that are scripted: programs that speak the protocol of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from magrpo.process.child import Child


def script_servers(monkeypatch: pytest.MonkeyPatch, start_server: Callable[[], list[str]]) -> None:
    """Let the engine run the command that ``start_server`` returns for each server, as if vLLM were installed."""

    def start_child(_: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        return Child(start_server(), log, environment)

    monkeypatch.setattr("magrpo.engines.vllm.Child", start_child)
    monkeypatch.setattr("magrpo.engines.vllm.find_vllm_obstacle", lambda *_: "")
