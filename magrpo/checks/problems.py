"""Calling problem sets, and checking their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args

import msgspec

from magrpo.checks.calls import PluginCall
from magrpo.errors import quote_value
from magrpo.interfaces import Problems
from magrpo.text import replace_surrogates
from magrpo.types import Problem, Split

_SPLITS = get_args(Split)


def load_problems(problems: Problems) -> dict[Split, list[Problem]]:
    """Load the splits of a problem set, with lone surrogates replaced.

    Raises ConfigError, naming the set, if the result is anything but splits of problems.
    """
    call = PluginCall("problems", problems, "load()")
    with call:
        splits: Any = problems.load()
    if not isinstance(splits, Mapping):
        raise call.refuse_value(splits, "a mapping from splits (train, test, ood) to lists of Problems")
    loaded: dict[Split, list[Problem]] = {}
    for split, members in splits.items():
        if split not in _SPLITS:
            raise call.refuse(f"returned the split {quote_value(split)}", f"splits are {', '.join(_SPLITS)}")
        if not isinstance(members, Iterable):
            raise call.refuse(
                f"returned {quote_value(members)} for the split {split!r}", "it must be a list of Problems"
            )
        with call:
            listed = list(members)  # inside ``call``, because a generator runs here
        for problem in listed:
            if not isinstance(problem, Problem):
                raise call.refuse(
                    f"returned {quote_value(problem)} in the split {split!r}", "every item must be a Problem"
                )
            check_problem(call, problem)
        loaded[split] = [Problem(**replace_surrogates(asdict(problem))) for problem in listed]
    return loaded


def check_problem(call: PluginCall, problem: Problem) -> None:
    """Raise ConfigError unless the fields of a problem, which ``call`` returned, are texts."""
    try:
        msgspec.convert({field: getattr(problem, field) for field in Problem.__match_args__}, Problem)
    except msgspec.ValidationError as error:
        raise call.refuse(f"returned the ill-typed problem {quote_value(problem.task_id)}", str(error)) from None
