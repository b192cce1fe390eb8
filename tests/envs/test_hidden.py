"""No observation holds anything of a hidden test, whatever the environment, the feedback and the program."""

from __future__ import annotations

import pytest

from magrpo.envs.coding import CodingEnv, SequentialEnv, SoloEnv
from magrpo.rewards.coding import CodingReward, SoloReward
from magrpo.sandboxes.pool import Pool
from magrpo.stages.backend import Cache
from magrpo.stages.score import score_texts
from magrpo.types import PastTurn, Problem

SHOWN = "def check(candidate):\n    assert candidate('SHOWNIN') == 'SHOWNOUT'\n"
HIDDEN = "def check(candidate):\n    assert candidate('HIDDENIN') == 'HIDDENOUT'\n"
FORGEABLE = HIDDEN + "    assert candidate(lambda: 'HIDDENIN') == 'HIDDENOUT'\n"
CACHE: Cache = {}
MAINS = {
    "wrong": "return aux(s) + '.'",
    "quotes": "if aux(s):\n        raise ValueError(f'{s!r}')\n    return s",
    "hoards": "seen.append(aux(s))\n    return seen",
    "digs": "import gc\n    mark = bytes([72, 73, 68]).decode()\n"
    "    return aux(s) + repr([x for x in gc.get_objects() if type(x) is list and mark in repr(x)])",
}


def seen(env: CodingEnv | SoloEnv, problem: Problem, main: str, pool: Pool) -> str:
    """All that the agents see after the program was scored."""
    texts = {"helper": "def aux(s):\n    return s", "main": f"seen = []\ndef f(s):\n    {MAINS[main]}"}
    solo = isinstance(env, SoloEnv)
    texts = {"solo": "\n".join(texts.values())} if solo else texts
    reward = SoloReward() if solo else CodingReward()
    [scored], _ = score_texts([(problem, texts)], reward=reward, sandbox=pool, cache=CACHE)
    assert not scored.masked
    assert not problem.hidden_test or "HIDDEN" in repr(scored.reports["program_hidden"])
    history = [PastTurn(texts, scored.reward, scored.reports)]
    if isinstance(env, SequentialEnv):
        history = [PastTurn({role: text}, scored.reward, scored.reports) for role, text in texts.items()]
    roles = env.acting(len(history))
    return "\n".join(m.content for role in roles for m in env.observe(problem, role, history, role).messages)


@pytest.mark.parametrize("main", MAINS)
@pytest.mark.parametrize("hidden", [HIDDEN, FORGEABLE], ids=["split", "forgeable"])
def test_nothing_of_a_hidden_test_is_seen(pool: Pool, main: str, hidden: str) -> None:
    problem = Problem("t", 'def f(s):\n    """Words."""\n', "f", SHOWN, hidden_test=hidden)
    options = [
        {"feedback": feedback, "prompt": prompt, "feedback_tests": "all", "num_turns": 4}
        for feedback in ("level_feedback", "level_passed", "passed", "plain", "discussion")
        for prompt in ("instruct", "bare")
    ]
    for chosen in options:
        envs: list[CodingEnv | SoloEnv] = [CodingEnv.model_validate(chosen), SequentialEnv.model_validate(chosen)]
        if chosen["feedback"] in ("level_feedback", "passed", "plain"):
            envs.append(SoloEnv.model_validate(chosen))
        for env in envs:
            assert "HIDDEN" not in seen(env, problem, main, pool), (env, main)


def test_what_is_not_hidden_is_quoted(pool: Pool) -> None:
    """So that the test above can fail."""
    env = CodingEnv(feedback_tests="all", num_turns=2)
    problem = Problem("t", 'def f(s):\n    """Words."""\n', "f", HIDDEN)
    assert "HIDDENOUT" in seen(env, problem, "wrong", pool)
    assert "0 of 1 tests passed" in seen(env, problem, "wrong", pool)
