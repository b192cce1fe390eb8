"""Calling rewards, and checking their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from magrpo.checks.calls import PluginCall
from magrpo.checks.part_names import check_part_names
from magrpo.errors import ConfigError, PluginFailed, list_choices, quote_value
from magrpo.interfaces import EnvPlugin, PricesRoles, Reward, RewardPlugin
from magrpo.plugins import TABLES
from magrpo.types import Execution, JointReward, Problem, Reports, RoleTexts

LARGEST_REWARD = 1e15
"""Largest absolute value of a reward and its parts; sums of squares of larger ones are meaningless in float32."""
_TOLERANCE = 1e-6
"""Fraction by which a part or a total may exceed its maximum, since sums in float32 are inexact."""


def check_maxima(reward: Reward) -> Reward:
    """Return ``reward`` if its ``maxima`` have usable names and finite values above 0; else raise ConfigError.

    Messages do not name the section, because the validation of a configuration adds it.
    """
    call = PluginCall("", reward, "maxima")
    with call:
        maxima: Any = reward.maxima
    if not isinstance(maxima, Mapping) or not maxima or not all(isinstance(part, str) for part in maxima):
        raise call.refuse_value(maxima, "a mapping from the name of each part to its largest value")
    check_part_names(maxima, call)
    for part, maximum in maxima.items():
        if not _is_number(maximum) or not 0 < float(maximum) <= LARGEST_REWARD:
            raise call.refuse(
                f"gives the part {part!r} the maximum {quote_value(maximum)}",
                "it must be a finite number above 0; turn a penalty into a bonus for avoiding it",
            )
    return reward


def check_priced_roles(reward: RewardPlugin, env: EnvPlugin, roles: Sequence[str]) -> None:
    """Raise ConfigError if ``reward`` says which roles it prices, and they are not those of ``env``.

    Raises it also if both are of the project and have a ``task`` each, and the tasks differ: a single author has the
    same role in all of them. Environments outside the project may have further roles, whose texts are not priced.
    """
    if not isinstance(reward, PricesRoles) or "priced_roles" not in vars(type(reward)):
        return
    priced = reward.priced_roles
    if set(priced) - set(roles) or (env.kind in TABLES["env"] and set(roles) - set(priced)):
        raise ConfigError(
            f"reward: {reward.kind!r} prices the roles {', '.join(priced)}; env {env.kind!r} has {', '.join(roles)}: "
            "choose a reward and an environment with the same roles (see docs/roles.md)"
        )
    task, env_task = reward.model_dump().get("task"), env.model_dump().get("task")
    are_ours = reward.kind in TABLES["reward"] and env.kind in TABLES["env"]
    if are_ours and task and env_task and task.removesuffix("_late") != env_task:
        raise ConfigError(f"reward.task = {task!r}, but env.task = {env_task!r}: set both to the same task")


def request_executions(reward: Reward, problem: Problem, texts: RoleTexts, reports: Reports) -> dict[str, Execution]:
    """The executions that ``reward`` still needs. Raises ConfigError for anything else, or for one with a report."""
    call = PluginCall("reward", reward, "executions()", problem.task_id)
    with call:
        wanted: Any = reward.executions(problem, texts, reports)
    if not isinstance(wanted, Mapping):
        raise call.refuse_value(wanted, "a mapping from report names to Executions, empty once every report is there")
    for name, execution in wanted.items():
        if not isinstance(name, str) or not isinstance(execution, Execution):
            raise call.refuse_value(dict(wanted), "a mapping from report names to Executions")
        for field in ("source", "entry_point", "test", "watch", "variant_of"):
            value = getattr(execution, field)
            if not isinstance(value, str):
                raise call.refuse(f"returned an Execution whose {field} is {quote_value(value)}", "it must be a string")
        if name in reports:
            raise call.refuse(
                f"asked for {name!r} again",
                "return only programs without a report, and an empty dict once all have one",
            )
    return dict(wanted)


def compute_price(reward: Reward, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
    """The price of a joint action, with all numbers as floats.

    Raises ConfigError, naming reward and problem, if the price is not a JointReward, does not have the parts of
    ``maxima``, or holds a number that is not finite or above its maximum.
    """
    call = PluginCall("reward", reward, "price()", problem.task_id)
    with call:
        price: Any = reward.price(problem, texts, reports)
    if not isinstance(price, JointReward):
        raise call.refuse_value(price, "a JointReward")
    total = _read_number(call, price.total, "total")
    parts = _read_numbers(call, price.parts, "parts")
    local = _read_numbers(call, price.local, "local")
    for name, value in {"total": total, **parts, **local}.items():
        _check_finite(name, value, problem)
    maxima = reward.maxima
    if parts.keys() != maxima.keys():
        _refuse_parts(call, parts, maxima)
    if not local.keys() <= texts.keys():
        other = next(name for name in local if name not in texts)
        raise call.refuse(f"gave {other!r} a local reward", f"local is keyed by role: {', '.join(texts)}")
    for part, value in parts.items():
        if value > maxima[part] * (1 + _TOLERANCE):
            raise call.refuse(f"gave the part {part!r} = {value:g}", f"its maximum in maxima is {maxima[part]:g}")
    _check_total(call, reward, problem, total)
    return JointReward(total, parts, local)


def judge_passed(reward: Reward, task_id: str, reports: Reports) -> bool | None:
    """Whether a joint action solved its problem; None if the task has no notion of solved."""
    call = PluginCall("reward", reward, "passed()", task_id)
    with call:
        passed: Any = reward.passed(reports)
    if not (passed is None or isinstance(passed, bool)):
        raise call.refuse_value(passed, "True, False, or None if nothing can be solved")
    return passed


def can_be_passed(reward: Reward) -> bool:
    """Whether the task of ``reward`` has a notion of solved, by its verdict on an action that ran nothing."""
    try:
        return judge_passed(reward, "", {}) is not None
    except PluginFailed:  # it looks for a report, so it judges one
        return True


def _refuse_parts(call: PluginCall, parts: Mapping[str, float], maxima: Mapping[str, float]) -> None:
    for part in parts:
        if part not in maxima:
            raise call.refuse(f"gave the part {part!r}", f"maxima has no such part: {list_choices(part, maxima)}")
    missing = ", ".join(repr(part) for part in maxima if part not in parts)
    raise call.refuse(f"left out {missing}", "it must give every part in maxima, 0 where nothing was earned")


def _check_total(call: PluginCall, reward: Reward, problem: Problem, total: float) -> None:
    """Refuse a total above the maximum. Only ``fraction`` knows it, because scale and shift belong to the reward."""
    fraction = _take_fraction(reward, problem, total)
    # Beside a large shift the rounding of the total itself may exceed the tolerance.
    if fraction > 1 + _TOLERANCE and _take_fraction(reward, problem, total - 4 * math.ulp(total)) > 1 + _TOLERANCE:
        raise call.refuse(
            f"gave the total {total:g}, {fraction:.0%} of the maximum",
            "fraction(total) must be at most 1, where every part is at its maximum: fix price(), maxima or fraction()",
        )


def _take_fraction(reward: Reward, problem: Problem, total: float) -> float:
    call = PluginCall("reward", reward, "fraction()", problem.task_id)
    with call:
        fraction: Any = reward.fraction(total)
    if type(fraction) is not float and not _is_number(fraction):
        raise call.refuse_value(fraction, "a number, 1 where every part is at its maximum")
    _check_finite("fraction(total)", float(fraction), problem)
    return float(fraction)


def _check_finite(name: str, value: float, problem: Problem) -> None:
    if not abs(value) <= LARGEST_REWARD:  # true of NaN, too
        raise ConfigError(
            f"reward: {name} = {value} for problem {quote_value(problem.task_id)}; a reward must be a "
            f"finite number of at most {LARGEST_REWARD:g}: fix its price(), or lower reward.scale"
        )


def _read_numbers(call: PluginCall, values: Any, field: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise call.refuse(f"returned a JointReward with {field} = {quote_value(values)}", "it must be a mapping")
    return {str(name): _read_number(call, value, field, name) for name, value in values.items()}


def _read_number(call: PluginCall, value: Any, field: str, name: object = None) -> float:
    if type(value) is float:  # nearly always; the check below takes longer
        return value
    if not _is_number(value):
        where = field if name is None else f"{field}[{name!r}]"
        raise call.refuse(f"returned a JointReward with {where} = {quote_value(value)}", "it must be a number")
    return float(value)


def _is_number(value: object) -> bool:
    """Whether ``value`` is a single number, perhaps of NumPy or PyTorch."""
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several
        return False
    return True
