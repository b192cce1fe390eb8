"""Calling environments, and checking their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, get_args

from magrpo.checks.calls import PluginCall
from magrpo.errors import quote_value
from magrpo.interfaces import Env
from magrpo.text import replace_surrogates
from magrpo.types import Message, MessageRole, Observation, PastTurn, Problem

_MESSAGE_ROLES = get_args(MessageRole)


def list_roles(env: Env) -> tuple[str, ...]:
    """The roles of ``env``."""
    call = PluginCall("env", env, "roles()")
    with call:
        roles: Any = env.roles()
    return _read_names(call, roles)


def list_acting(env: Env, turn: int) -> tuple[str, ...]:
    """The roles that act at ``turn``."""
    call = PluginCall("env", env, f"acting({turn})")
    with call:
        acting: Any = env.acting(turn)
    return _read_names(call, acting)


def count_turns(env: Env) -> int:
    """The number of turns of an episode."""
    call = PluginCall("env", env, "num_turns")
    with call:
        num_turns: Any = env.num_turns
    if not isinstance(num_turns, int) or isinstance(num_turns, bool) or num_turns < 1:
        raise call.refuse_value(num_turns, "a number of turns, at least 1")
    return num_turns


def count_priced_turns(env: Env) -> int:
    """The number of turns at which every role has written, so that there is something to price: at least the last."""
    roles, written = set(list_roles(env)), set[str]()
    num_priced = 0
    for turn in range(count_turns(env)):
        written.update(list_acting(env, turn))
        num_priced += written >= roles
    return num_priced


def observe_problem(env: Env, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
    """The observation of the agent in ``role``, with lone surrogates replaced.

    Raises ConfigError, naming environment and problem, if the result is not an observation.
    """
    call = PluginCall("env", env, "observe()", problem.task_id)
    with call:
        seen: Any = env.observe(problem, role, history, agent)
    if not isinstance(seen, Observation):
        raise call.refuse_value(seen, "an Observation")
    if not isinstance(seen.messages, tuple) or not seen.messages:
        raise call.refuse(
            f"returned an Observation with messages = {quote_value(seen.messages)}",
            "messages must be a non-empty tuple",
        )
    for message in seen.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise call.refuse(
                f"returned the message {quote_value(message)}", "every message must be a Message(role, text)"
            )
        if message.role not in _MESSAGE_ROLES:
            raise call.refuse(
                f"returned a message with the role {quote_value(message.role)}",
                f"message roles are {', '.join(_MESSAGE_ROLES)}",
            )
    return Observation(
        tuple(replace(message, content=replace_surrogates(message.content)) for message in seen.messages)
    )


def _read_names(call: PluginCall, names: Any) -> tuple[str, ...]:
    is_list = isinstance(names, Collection) and not isinstance(names, str) and len(names) > 0
    if not is_list or not all(isinstance(name, str) for name in names):
        raise call.refuse_value(names, "a tuple of roles, at least one")
    return tuple(names)
