"""A game of two from TextArena: the agents ``first`` and ``second`` look for pairs of cards that lie face down.

Each sees what the game shows to its player, and answers with a move. The game has a winner, but both agents get the
same reward, the share of the pairs that they found together, so they learn to remember for each other. To let each play
for itself, return local rewards, here those of the winner and the loser, or 0 and 0::

    rewards, _ = game.close()
    return {"reward": 0.0, "local": {name: rewards[player] for player, name in enumerate(PLAYERS)}}

Run it in a virtual environment of its own, with a configuration like this one::

    python -m venv games && games/bin/pip install --no-deps -r requirements/examples.txt

    problems.kind = "pipelines.examples.numbered_tasks:NumberedTasks"
    reward.kind = "returned"
    [env]
    kind = "program"
    run = "games/bin/python pipelines/examples/textarena_program.py {problem_file}"
"""

import json
import sys
from pathlib import Path

import textarena
from openai import OpenAI

PLAYERS = ("first", "second")
GRID_SIZE = 4
NUM_PAIRS = GRID_SIZE**2 // 2
MAX_TURNS = 16


def play_game(seed: int) -> float:
    """Play one game; returns the share of the pairs that were found."""
    client = OpenAI()
    game = textarena.make("MemoryGame-v0", grid_size=GRID_SIZE, max_turns=MAX_TURNS)
    game.reset(num_players=len(PLAYERS), seed=seed)
    is_over = False
    while not is_over:
        player, observation = game.get_observation()
        completion = client.chat.completions.create(
            model=PLAYERS[player], messages=[{"role": "user", "content": observation}]
        )
        is_over, _ = game.step(completion.choices[0].message.content or "")
    found: dict[int, int] = game.state.game_state["score"]
    return sum(found.values()) / NUM_PAIRS


if __name__ == "__main__":
    problem = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(play_game(int(problem["prompt"]))))
