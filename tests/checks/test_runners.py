from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from magrpo.checks.runners import generate_completions, open_engine_plugin, open_sandbox, run_executions, serve_weights
from magrpo.errors import ConfigError
from magrpo.interfaces import EnginePlugin
from magrpo.types import Action, Case, Execution, ExecutionReport, Request, SamplingParams
from tests import plugins
from tests.fakes import ScriptedEngine, ScriptedSandbox

EXECUTION = Execution("s", "f", "t")
REPORT = ExecutionReport("pass", (Case("pass"),), "none")
REQUEST = Request("ada", (1,), SamplingParams(), 0)


class Returning:
    """Returns ``value``, whatever it is asked to do."""

    level = "none"

    def __init__(self, value: Any) -> None:
        self.value = value

    def run(self, *_: object) -> Any:
        return self.value

    def open(self, *_: object) -> Any:
        return self.value

    serve = generate = open

    def sleep(self) -> None: ...

    wake = close = sleep


def test_what_plugins_open_has_the_methods() -> None:
    sandbox, engine = plugins.Sandbox(kind="s"), plugins.Engine(kind="e")
    assert isinstance(open_sandbox(sandbox), ScriptedSandbox)
    opened = open_engine_plugin(cast(EnginePlugin, engine), Mock())
    assert isinstance(opened, ScriptedEngine)
    assert generate_completions(serve_weights(opened, 0, {}), [REQUEST], None)[0].text == "good"
    for call, method in (
        (lambda: open_sandbox(cast(Any, Returning(None))), "sandbox tests.checks.test_runners:Returning: open()"),
        (
            lambda: open_engine_plugin(cast(Any, Returning(None)), Mock()),
            "engine tests.checks.test_runners:Returning: open()",
        ),
        (lambda: serve_weights(Returning(None), 0, {}), "engine tests.checks.test_runners:Returning: serve()"),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert str(raised.value).startswith(f"{method} returned None; it must return a")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "returned None; it must return a list of ExecutionReports"),
        (["pass"], "returned ['pass']; it must return a list of ExecutionReports"),
        ([REPORT, REPORT], "returned 2 reports; it must return one for each of the 1 programs"),
    ],
)
def test_unusable_reports_are_refused(value: object, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_executions(Returning(value), [EXECUTION], None)
    assert str(raised.value) == f"sandbox tests.checks.test_runners:Returning: run() {fault}"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "returned None; it must return a list of Actions"),
        (["text"], "returned ['text']; it must return a list of Actions"),
        ([], "returned 0 completions; it must return one for each of the 1 requests"),
        ([Action("bob", "", (), (), "stop", 0)], "answered a request of agent 'ada' with Action(agent='bob'"),
        ([Action("ada", None, (), (), "stop", 0)], "answered a request of agent 'ada' with Action("),
        ([Action("ada", "", (1, 2), (-1.0,), "stop", 0)], "returned a completion of 2 tokens with 1 sampling_logps; "),
    ],
)
def test_unusable_completions_are_refused(value: object, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        generate_completions(Returning(value), [REQUEST], None)
    assert str(raised.value).startswith(f"engine tests.checks.test_runners:Returning: generate() {fault}")


def test_texts_of_plugins_lose_their_lone_surrogates() -> None:
    report = replace(REPORT, cases=(Case("wrong", "it returned \ud800"),))
    [clean] = run_executions(Returning([report]), [EXECUTION], None)
    assert clean == replace(REPORT, cases=(Case("wrong", "it returned \ufffd"),))
    [action] = generate_completions(Returning([Action("ada", "a\ud800b", (), (), "stop", 0)]), [REQUEST], None)
    assert action.text == "a\ufffdb"
