"""An OpenEnv server with an environment of one text field, for ``test_environments``: ``python THIS PORT``.

Runs in a virtual environment with ``openenv``. An episode has one to three steps, as the seed says. A step has the
reward 1 if the action begins with the word that the observation names.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WORDS = ("def", "class", "def")


class Writing(Action):
    text: str


class Wish(Observation):
    word: str


class Wishes(Environment):
    """Asks for one to three words, depending on the seed, and pays 1 for each action that begins with its word."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._num_steps, self._state = 0, State()

    def reset(self, seed: int | None = None, **_: Any) -> Wish:
        self._num_steps, self._state = 1 + (seed or 0) % len(WORDS), State()
        return Wish(word=WORDS[0])

    def step(self, action: Writing, **_: Any) -> Wish:
        wish = WORDS[self._state.step_count]
        self._state.step_count += 1
        is_over = self._state.step_count == self._num_steps
        following = WORDS[self._state.step_count % len(WORDS)]
        return Wish(word=following, reward=float(action.text.startswith(wish)), done=is_over)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Wishes, Writing, Wish, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
