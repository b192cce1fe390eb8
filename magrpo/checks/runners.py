"""Calling sandboxes and engines, and checking their results. Their exceptions, which callers know, pass unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.checks.calls import PluginCall
from magrpo.errors import quote_value
from magrpo.interfaces import Engine, EnginePlugin, Progress, Sandbox, SandboxPlugin, Served
from magrpo.text import replace_surrogates
from magrpo.types import Action, Case, Execution, ExecutionReport, Request

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost


def open_sandbox(plugin: SandboxPlugin) -> Sandbox:
    """Open a sandbox. Raises ConfigError if the plug-in opens anything else."""
    sandbox: Any = plugin.open()
    if not isinstance(sandbox, Sandbox):
        raise PluginCall("sandbox", plugin, "open()").refuse_value(sandbox, "a Sandbox: level, run() and close()")
    return sandbox


def open_engine_plugin(plugin: EnginePlugin, host: EngineHost) -> Engine:
    """Open an engine. Raises ConfigError if the plug-in opens anything else."""
    engine: Any = plugin.open(host)
    if not isinstance(engine, Engine):
        expected = "an Engine: serve(), sleep(), wake() and close()"
        raise PluginCall("engine", plugin, "open()").refuse_value(engine, expected)
    return engine


def serve_weights(engine: Engine, version: int, weights: Mapping[str, Path]) -> Served:
    """Serve weights on an engine. Raises ConfigError if the engine returns anything but a Served."""
    served: Any = engine.serve(version, weights)
    if not isinstance(served, Served):
        raise PluginCall("engine", engine, "serve()").refuse_value(served, "a Served: generate() and close()")
    return served


def run_executions(
    sandbox: Sandbox, executions: Sequence[Execution], progress: Progress | None
) -> list[ExecutionReport]:
    """Run programs; replaces lone surrogates in the messages of reports.

    Raises ConfigError unless the sandbox returns one report for each program.
    """
    reports: Any = sandbox.run(executions, progress)
    call = PluginCall("sandbox", sandbox, "run()")
    if not isinstance(reports, Sequence) or not all(isinstance(report, ExecutionReport) for report in reports):
        raise call.refuse_value(reports, "a list of ExecutionReports")
    if len(reports) != len(executions):
        raise call.refuse(
            f"returned {len(reports)} reports", f"it must return one for each of the {len(executions)} programs"
        )
    return [replace(report, cases=tuple(map(_clean_case, report.cases))) for report in reports]


def _clean_case(case: Case) -> Case:
    return replace(case, message=replace_surrogates(case.message))


def generate_completions(engine: Served, requests: Sequence[Request], progress: Progress | None) -> list[Action]:
    """Sample completions; replaces lone surrogates in their texts.

    Raises ConfigError unless the engine returns one whole completion for each request.
    """
    actions: Any = engine.generate(requests, progress)
    call = PluginCall("engine", engine, "generate()")
    if not isinstance(actions, Sequence) or not all(isinstance(action, Action) for action in actions):
        raise call.refuse_value(actions, "a list of Actions")
    if len(actions) != len(requests):
        raise call.refuse(
            f"returned {len(actions)} completions", f"it must return one for each of the {len(requests)} requests"
        )
    for request, action in zip(requests, actions, strict=True):
        if action.agent != request.agent or not isinstance(action.text, str):
            raise call.refuse(
                f"answered a request of agent {request.agent!r} with {quote_value(action)}",
                "the completion must name that agent and hold a string as its text",
            )
        if len(action.token_ids) != len(action.sampling_logps):
            raise call.refuse(
                f"returned a completion of {len(action.token_ids)} tokens with {len(action.sampling_logps)} "
                "sampling_logps",
                "it must have one for each token",
            )
    return [replace(action, text=replace_surrogates(action.text)) for action in actions]
