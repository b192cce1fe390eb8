from __future__ import annotations

import pytest

from magrpo.envs.writing import BARE_LINES, ROLES, SequentialWritingEnv, SoloWritingEnv, WritingEnv
from magrpo.rewards.writing import FORMS, MAXIMA
from magrpo.types import PENDING, JointReward, Message, PastTurn, Problem

PROBLEM = Problem("post/0", "I lost {my} keys.")
TEXTS = {"ada": "FIRSTTEXT", "bob": "SECONDTEXT"}


def past(*parts: float) -> PastTurn:
    return PastTurn(TEXTS, JointReward(sum(parts), dict(zip(MAXIMA, parts, strict=True))), {})


GOOD, MIDDLE, BAD = past(0.5, 1.0, 0.5, 0.95), past(0.5, 0.4, 0.5, 0.3), past(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("task", ["tldr", "arxiv"])
def test_roles_are_those_of_the_reward(task: str) -> None:
    env = WritingEnv.model_validate({"task": task})
    assert env.roles() == FORMS[task].roles == ROLES[task]


@pytest.mark.parametrize("task", ["tldr", "arxiv"])
def test_instruct_first_turn(task: str) -> None:
    env = WritingEnv.model_validate({"task": task})
    for role in env.roles():
        (message,) = env.observe(PROBLEM, role, [], "ada").messages
        assert message.role == "user"
        assert PROBLEM.prompt in message.content


def test_bare() -> None:
    env = WritingEnv(prompt="bare", num_turns=2)
    first = f"# summary\n{PROBLEM.prompt}"
    assert env.observe(PROBLEM, "summary", [], "ada").messages == (Message("user", first),)
    for turn, lines in [
        (GOOD, "all good"),
        (MIDDLE, "length ok\nratio bad\nwords ok\nstyle bad"),
        (BAD, "length bad"),
    ]:
        (message,) = env.observe(PROBLEM, "summary", [turn], "ada").messages
        assert message.content == f"{first}\n# previous\nFIRSTTEXT\n# feedback\n{lines}\n"
        assert set(lines.split("\n")) <= set(BARE_LINES)


def test_instruct_feedback_is_a_conversation() -> None:
    env = WritingEnv(num_turns=3)
    messages = env.observe(PROBLEM, "elaboration", [BAD, GOOD], "bob").messages
    assert [message.role for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert "too short or too long" in messages[2].content
    assert "fit each other well" in messages[4].content


@pytest.mark.parametrize("prompt", ["instruct", "bare"])
@pytest.mark.parametrize("feedback", ["level_feedback", "plain", "discussion"])
def test_only_discussion_shows_the_partners_text(prompt: str, feedback: str) -> None:
    env = WritingEnv.model_validate({"prompt": prompt, "feedback": feedback, "num_turns": 2})
    seen = "\n".join(m.content for m in env.observe(PROBLEM, "summary", [MIDDLE], "ada").messages)
    assert "FIRSTTEXT" in seen
    assert ("SECONDTEXT" in seen) == (feedback == "discussion")


def test_feedback_needs_no_part_of_the_reward() -> None:
    """A user's own reward has other parts; nothing is claimed of those that are missing."""
    own = PastTurn(TEXTS, JointReward(1.0, {"clarity": 1.0}), {})
    bare, full = WritingEnv(prompt="bare", num_turns=2), WritingEnv(num_turns=2)
    assert bare.observe(PROBLEM, "summary", [own], "ada").messages[0].content.endswith("# feedback\nrevise\n")
    said = full.observe(PROBLEM, "summary", [own], "ada").messages[-1].content
    assert said.startswith("Look at your text again and improve it where you can.\n")
    some = PastTurn(TEXTS, JointReward(1.0, {"clarity": 1.0, "style": 0.1}), {})
    assert bare.observe(PROBLEM, "summary", [some], "ada").messages[0].content.endswith("# feedback\nstyle bad\n")


@pytest.mark.parametrize("task", ["tldr", "arxiv"])
def test_the_second_author_sees_the_first_ones_text(task: str) -> None:
    env = SequentialWritingEnv.model_validate({"task": task})
    first, second = env.roles()
    assert [env.acting(turn) for turn in range(4)] == [(first,), (second,)] * 2
    (asked,) = env.observe(PROBLEM, first, [], "ada").messages
    (reads,) = env.observe(PROBLEM, second, [PastTurn({"ada": "FIRSTTEXT"}, PENDING, {})], "bob").messages
    assert PROBLEM.prompt in asked.content
    assert "partner wrote" not in asked.content
    assert PROBLEM.prompt in reads.content
    assert reads.content.startswith("Your partner wrote:\nFIRSTTEXT\n\n")
    assert reads.content.endswith("in three sentences." if task == "tldr" else "as running text.")
    for message in (asked, reads):
        assert "do not see" not in message.content
        assert "at the same time" not in message.content


def test_authors_in_turn_get_feedback_on_a_whole_round() -> None:
    env = SequentialWritingEnv(prompt="bare", num_turns=4)
    first = PastTurn({"ada": "FIRSTTEXT"}, PENDING, {})
    round_ = [first, PastTurn({"bob": "SECONDTEXT"}, BAD.reward, {})]
    (message,) = env.observe(PROBLEM, "elaboration", [first], "bob").messages
    assert message.content == f"# partner\nFIRSTTEXT\n# elaboration\n{PROBLEM.prompt}"
    (message,) = env.observe(PROBLEM, "summary", round_, "ada").messages
    feedback = "# feedback\nlength bad\n"
    assert message.content == f"# summary\n{PROBLEM.prompt}\n# previous\nFIRSTTEXT\n{feedback}"
    (message,) = env.observe(PROBLEM, "elaboration", [*round_, PastTurn({"ada": "NEWER"}, PENDING, {})], "bob").messages
    expected = f"# partner\nNEWER\n# elaboration\n{PROBLEM.prompt}\n# previous\nSECONDTEXT\n{feedback}"
    assert message.content == expected


@pytest.mark.parametrize("task", ["tldr", "arxiv"])
def test_one_author_is_asked_for_both_texts(task: str) -> None:
    env = SoloWritingEnv.model_validate({"task": task, "num_turns": 2})
    assert env.roles() == env.acting(0) == ("solo",)
    (message,) = env.observe(PROBLEM, "solo", [], "ada").messages
    assert PROBLEM.prompt in message.content
    assert message.content.count("empty line") >= 1
    assert "partner" not in message.content
    for turn in (GOOD, MIDDLE, BAD):
        revised = env.observe(PROBLEM, "solo", [PastTurn({"ada": "BOTH"}, turn.reward, {})], "ada").messages
        assert "partner" not in revised[2].content
        assert ("content words in both" in revised[2].content) == (turn is MIDDLE)
    assert revised[1] == Message("assistant", "BOTH")
    assert "too short or too long" in revised[2].content
    assert "two texts only" in revised[2].content
    (message,) = SoloWritingEnv(prompt="bare").observe(PROBLEM, "solo", [], "ada").messages
    assert message.content == f"# solo\n{PROBLEM.prompt}"
