from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magrpo.checks.envs import count_turns, list_acting, list_roles, observe_problem
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.types import Message, Observation, Problem
from tests.fakes import LengthEnv
from tests.plugins import CONFIG

PROBLEM = Problem("add/2", "p", "f", "t")
NAME = "env tests.checks.test_envs:Returning"


class Returning(LengthEnv):
    """Returns ``value``, whatever it is asked."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.num_turns = self.value = value

    def roles(self) -> Any:
        return self.value

    def acting(self, turn: int) -> Any:
        return self.value

    def observe(self, *_: object) -> Any:
        return self.value


@pytest.mark.parametrize("value", ["main", (), None, (1,), 3])
def test_roles_are_names(value: object) -> None:
    for list_names, method in ((list_roles, "roles()"), (lambda env: list_acting(env, 2), "acting(2)")):
        with pytest.raises(ConfigError) as raised:
            list_names(Returning(value))
        expected = "it must return a tuple of roles, at least one"
        assert str(raised.value) == f"{NAME}: {method} returned {value!r}; {expected}"
    assert list_roles(Returning(["helper", "main"])) == ("helper", "main")


@pytest.mark.parametrize("value", ["2", 0, 1.5, True, None])
def test_turns_are_counted(value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        count_turns(Returning(value))
    assert str(raised.value) == f"{NAME}: num_turns is {value!r}; it must be a number of turns, at least 1"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "returned None for problem 'add/2'; it must return an Observation"),
        ("text", "returned 'text' for problem 'add/2'; it must return an Observation"),
        (Observation(()), "returned an Observation with messages = () for problem"),
        (Observation([Message("user", "x")]), "returned an Observation with messages = [Message("),
        (Observation(("x",)), "returned the message 'x' for problem"),
        (Observation((Message("user", None),)), "returned the message Message(role='user', content=None) for"),
        (Observation((Message("partner", "x"),)), "returned a message with the role 'partner' for problem"),
    ],
)
def test_unusable_observations_are_refused(value: object, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        observe_problem(Returning(value), PROBLEM, "main", (), "ada")
    assert str(raised.value).startswith(f"{NAME}: observe() {fault}")
    assert "\n" not in str(raised.value)


def test_a_mistake_in_roles_is_found_when_a_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace("tests.plugins:Env", "tests.checks.plugins:Letters"))
    with pytest.raises(
        ConfigError, match=r"mine[.]toml: env tests[.]checks[.]plugins:Letters: acting[(]0[)] returned 'main'"
    ):
        load_config(path)
    path.write_text(CONFIG.replace("tests.plugins:Env", "tests.checks.plugins:Broken"))
    with pytest.raises(
        ConfigError, match=r"mine[.]toml: env tests[.]checks[.]plugins:Broken: acting[(]0[)] failed: Zero"
    ):
        load_config(path)


class Waiting(LengthEnv):
    """Asks a service that does not answer."""

    def observe(self, *_: object) -> Observation:
        raise ConnectionError("http://127.0.0.1:1 does not answer")


def test_a_service_that_does_not_answer_stays_a_connection_error() -> None:
    """So that Prefect tries again."""
    name = NAME.replace("Returning", "Waiting")
    with pytest.raises(ConnectionError, match=f"{name}: observe[(][)] failed for problem 'add/2': http://127.0.0.1:1"):
        observe_problem(Waiting(), PROBLEM, "main", (), "ada")


def test_observations_lose_their_lone_surrogates() -> None:
    seen = Observation((Message("user", "a\ud800b"),))
    assert observe_problem(Returning(seen), PROBLEM, "main", (), "ada") == Observation((Message("user", "a\ufffdb"),))
