"""Penalties: each key makes a game lose that the writing reward alone pays for, in training as in evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from magrpo.algo.answers import measure_completions, read_prompt
from magrpo.config.agents import AgentConfig
from magrpo.config.run import load_config
from magrpo.config.sections import AlgoConfig, EvalConfig, PenaltyConfig, RolloutConfig
from magrpo.envs.writing import WritingEnv
from magrpo.errors import ConfigError
from magrpo.reports.figures import shown_quantities
from magrpo.rewards.writing import WritingReward
from magrpo.run.files import GROUPS, SCORES, read_groups, read_scored, write_scores
from magrpo.run.store import write_records
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.evaluate import evaluate
from magrpo.stages.rollout import child_nodes, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import (
    PENALTY,
    PENDING,
    Action,
    JointReward,
    PastTurn,
    Problem,
    Prompt,
    Request,
    RolloutGroup,
    ScoredTurn,
    Turn,
)
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, ScriptedSandbox, TurnsEnv, render
from tests.stages.crediting import credit_with
from tests.stages.test_rollout import AGENTS as PROGRAMMERS

AGENTS = tuple(AgentConfig(name=name, role=name, model="m") for name in ("summary", "elaboration"))
POST = Problem(
    "post/0",
    "My neighbour asked me in March to water her tomatoes while she was away for two weeks. I said yes, and then I "
    "forgot for nine days because my daughter fell ill and we spent every evening at the hospital. When I finally "
    "went over with the key, most of the plants were brown and the soil was as hard as stone. I bought new plants at "
    "the market, and they look almost the same, but she grew the old ones from her grandmother's seeds. She comes "
    "home tomorrow, and I do not know whether to tell her.",
)
SUMMARY = "I let my neighbour's tomatoes die, replaced the plants, and wonder whether to tell her."
SHORT = (
    "Because my daughter was ill, I forgot to water the tomatoes of a neighbour, and the plants died. The new ones "
    "look alike, but hers came from old seeds."
)
WHOLE = (
    "While a neighbour was travelling, I promised to water her tomatoes. However, my daughter became ill, so nobody "
    "went there for more than a week and the plants died. I replaced them, but hers were heirlooms."
)
RAMBLING = f"{WHOLE} Furthermore, there are many things that one could say about"
COPY = POST.prompt.partition(" When I")[0]
BRIEF = (
    "As my daughter was ill, I forgot the tomatoes of a neighbour, and they died. The new plants look alike, though."
)
LOOP = f"{BRIEF} {BRIEF}"
ANYTHING = (
    "However, this story highlights a versatile approach to everyday challenges. Therefore it offers valuable lessons "
    "about responsibility, and a seamless experience for everybody."
)


def make_action(agent: str, text: str, *, is_cut: bool = False) -> Action:
    return Action(agent, text, (1, 2), (-1.0, -1.0), "length" if is_cut else "stop", 0)


def make_group(elaborations: Sequence[Action]) -> RolloutGroup[Turn]:
    """One summary for all of the elaborations, with the prompts of the environment."""
    env = WritingEnv()
    actions = {
        "summary": (make_action("summary", SUMMARY),) * len(elaborations),
        "elaboration": tuple(elaborations),
    }
    prompts = {name: Prompt(env.observe(POST, name, (), name), (1,)) for name in actions}
    turns = tuple(Turn(dict.fromkeys(actions, index)) for index in range(len(elaborations)))
    return RolloutGroup(POST, (), (), prompts, actions, turns)


def score_group(
    group: RolloutGroup[Turn],
    penalty: PenaltyConfig,
    reward: WritingReward = WritingReward(),  # noqa: B008
) -> RolloutGroup[ScoredTurn]:
    """The group as the stage ``score`` prices it, with penalties and without a sandbox."""
    [scored], _ = score([group], Team(AGENTS, WritingEnv(), reward, penalty), NoSandbox().open(), cache={})
    return scored


GAMES = {
    "cut_off": (make_action("elaboration", SHORT), make_action("elaboration", RAMBLING, is_cut=True)),
    "copied": (make_action("elaboration", SHORT), make_action("elaboration", COPY)),
    "repeated": (make_action("elaboration", BRIEF), make_action("elaboration", LOOP)),
    "strayed": (make_action("elaboration", BRIEF), make_action("elaboration", ANYTHING)),
}
"""For each key an honest answer, and one that games the reward in the way that the key prices."""


@pytest.mark.parametrize("key", GAMES)
def test_a_game_that_wins_without_its_penalty_loses_with_it(key: str) -> None:
    group = make_group(GAMES[key])
    for cost, gamed_wins in ((0.0, True), (0.5, False)):
        scored = score_group(group, PenaltyConfig.model_validate({key: cost}))
        samples, metrics = credit_with([scored], AlgoConfig(), ["summary", "elaboration"])
        honest, gamed = (turn.reward.total for turn in scored.turns)
        assert (gamed > honest) is gamed_wins
        for agent in ("summary", "elaboration"):  # the reward is joint, and so is the penalty
            advantages = [sample.advantage for sample in samples[agent]]
            assert (advantages[1] > 0 > advantages[0]) is gamed_wins
            assert (advantages[0] > 0 > advantages[1]) is not gamed_wins
        assert (metrics.get("signal/penalty") == 1) is not gamed_wins


def test_costs_of_all_agents_add_up_and_scale_with_the_reward() -> None:
    group = make_group([make_action("elaboration", LOOP, is_cut=True)])
    cut = {name: tuple(replace(one, finish_reason="length") for one in made) for name, made in group.actions.items()}
    group = replace(group, actions=cut)
    penalty = PenaltyConfig(cut_off=0.25, repeated=0.5)
    for scale, shift in ((1.0, 0.0), (2.0, -1.0)):
        reward = WritingReward(scale=scale, shift=shift)
        [plain] = score_group(group, PenaltyConfig(), reward).turns
        [charged] = score_group(group, penalty, reward).turns
        # Both answers are cut, and the second half of the elaboration repeats the first.
        assert reward.fraction(plain.reward.total) - reward.fraction(charged.reward.total) == pytest.approx(0.75)
        assert charged.reward.parts == plain.reward.parts | {PENALTY: pytest.approx(-0.75 * 3)}
        assert charged.reward.total == pytest.approx(scale * sum(charged.reward.parts.values()) + shift)


def test_by_default_nothing_changes() -> None:
    group = make_group([make_action("elaboration", COPY, is_cut=True), make_action("elaboration", LOOP)])
    texts = [{"summary": SUMMARY, "elaboration": text} for text in (COPY, LOOP)]
    prices = [WritingReward().price(POST, pair, {}) for pair in texts]
    assert [turn.reward for turn in score_group(group, PenaltyConfig()).turns] == prices
    assert not PenaltyConfig().is_on


def test_an_empty_answer_costs_nothing_but_earns_nothing_either() -> None:
    group = make_group([make_action("elaboration", ""), make_action("elaboration", COPY, is_cut=True)])
    empty, gamed = score_group(group, PenaltyConfig(cut_off=0.5, copied=0.5)).turns
    assert empty.reward.total == 0
    assert gamed.reward.total < 0, "so the reward itself must pay for an answer"


def test_a_stored_rollout_is_priced_again_alike(tmp_path: Path) -> None:
    group = make_group([make_action("elaboration", COPY, is_cut=True), make_action("elaboration", LOOP)])
    penalty = PenaltyConfig(cut_off=0.1, copied=0.3, repeated=0.7)
    scored = score_group(group, penalty)
    for name in ("rollout.0", "score.0"):
        (tmp_path / name).mkdir()
    write_records(tmp_path / "rollout.0" / GROUPS, [group])
    write_scores(tmp_path / "score.0", [scored])
    assert (tmp_path / "score.0" / SCORES).exists()
    assert read_scored(tmp_path / "score.0") == [scored]
    [stored] = read_groups(tmp_path / "rollout.0")
    assert score_group(stored, penalty) == scored


class CuttingEngine(ScriptedEngine):
    """Cuts every answer that ends in three dots."""

    def _answer(self, request: Request, version: int) -> Action:
        action = super()._answer(request, version)
        return replace(action, finish_reason="length") if action.text.endswith("...") else action


def test_evaluation_prices_answers_as_training_does() -> None:
    written = {"summary": SUMMARY, "elaboration": f"{COPY} ..."}
    [trained] = score_group(
        make_group([make_action("elaboration", written["elaboration"], is_cut=True)]),
        penalty := PenaltyConfig(cut_off=0.2, copied=0.4),
    ).turns
    reward = WritingReward()
    team = Team(AGENTS, WritingEnv(), reward, penalty)
    engine = CuttingEngine(lambda request: written[request.agent])
    backend = Backend(engine=engine, sandbox=NoSandbox().open(), render=render)
    splits = {"test": [POST, replace(POST, task_id="post/1")]}
    report, _ = evaluate(team, backend, splits, EvalConfig(num_samples=1), RolloutConfig(), 0)
    for row in report.rows:
        assert (row.returns, row.parts) == ((trained.reward.total,), (trained.reward.parts,))
    summary = report.summary["test/sampled"]
    assert summary["return"].mean == reward.fraction(trained.reward.total)
    assert summary[PENALTY].mean == pytest.approx(trained.reward.parts[PENALTY] / 3)
    assert summary[PENALTY].mean < -0.5
    shown = shown_quantities(summary, reward.maxima)
    assert shown == [*reward.maxima, PENALTY, "return", "generated_tokens"]


def test_an_answer_of_a_pending_turn_costs_when_its_text_is_rewarded() -> None:
    engine = CuttingEngine(lambda request: "good..." if request.agent == "h" and request.seed % 2 else "good")
    sandbox = ScriptedSandbox(lambda _: "pass")
    team = Team(PROGRAMMERS, TurnsEnv(2), PassReward(), PenaltyConfig(cut_off=0.25))
    backend = Backend(engine=engine, sandbox=sandbox, render=render)
    config = RolloutConfig(group_size=8)
    first, _ = score(rollout(root_nodes([POST], config), team, backend, config, 0), team, sandbox, cache={})
    assert {turn.reward == PENDING for turn in first[0].turns} == {True}
    second, _ = score(rollout(child_nodes(first, config), team, backend, config, 1), team, sandbox, cache={})
    totals = {group.history[0].texts["h"]: group.turns[0].reward.total for group in second}
    assert totals == {"good...": 1.5, "good": 2.0}
    samples, _ = credit_with([*first, *second], AlgoConfig(), ["h", "m"], rollout=config, num_turns=2)
    cut = [action.finish_reason == "length" for action in first[0].actions["h"]]
    assert [sample.advantage < 0 for sample in samples["h"]] == cut

    report, _ = evaluate(team, backend, {"test": [POST]}, EvalConfig(num_samples=8), config, 0)
    sampled = {row.texts["h"]: row.returns for row in report.rows if row.mode == "sampled"}
    assert sampled == {"good...": (0.0, 1.5), "good": (0.0, 2.0)}


def test_a_text_that_left_its_post_costs_at_every_turn_that_keeps_it() -> None:
    """The prompts of later turns quote it, but it is not what they are about. Its author may keep it, no other may."""
    env = WritingEnv(num_turns=2, feedback="discussion")
    past = PastTurn({"summary": SUMMARY, "elaboration": ANYTHING}, JointReward(0.0, {}), {})
    texts = {"summary": ANYTHING, "elaboration": ANYTHING}
    prompts = {name: Prompt(env.observe(POST, name, (past,), name), (1,)) for name in texts}
    actions = {name: (make_action(name, text),) for name, text in texts.items()}
    measured = measure_completions(RolloutGroup(POST, (0,), (past,), prompts, actions, ()))
    assert ANYTHING in read_prompt(prompts["elaboration"])
    assert min(measured[name][0].strayed_frac for name in texts) > 0.5, "a few words are those of the instructions"
    assert [measured[name][0].copied_frac for name in texts] == [1.0, 0.0]


def test_a_partner_that_copied_the_post_takes_no_words_from_it() -> None:
    """The prompt of a later turn does not quote the partner, so only the post has the partner's words."""
    env, shares = WritingEnv(num_turns=2), []
    for partner in (ANYTHING, POST.prompt):
        past = PastTurn({"summary": partner, "elaboration": ANYTHING}, JointReward(0.0, {}), {})
        prompts = {"elaboration": Prompt(env.observe(POST, "elaboration", (past,), "elaboration"), (1,))}
        actions = {"elaboration": (make_action("elaboration", SUMMARY),)}
        measured = measure_completions(RolloutGroup(POST, (0,), (past,), prompts, actions, ()))
        shares.append(measured["elaboration"][0].strayed_frac)
    assert shares[0] == shares[1] < 0.5


def test_masked_turns_stay_masked() -> None:
    sandbox = ScriptedSandbox(lambda _: "infra_error")
    team = Team(PROGRAMMERS, LengthEnv(), PassReward(), PenaltyConfig(cut_off=0.25))
    backend = Backend(engine=CuttingEngine(lambda _: "good..."), sandbox=sandbox, render=render)
    config = RolloutConfig(group_size=2)
    [group], _ = score(rollout(root_nodes([POST], config), team, backend, config, 0), team, sandbox, cache={})
    assert [(turn.masked, turn.reward) for turn in group.turns] == [(True, JointReward(0.0, {}))] * 2


CONFIG = "pipelines/configs/writing_embedded.toml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("penalty.cut_off=-0.1", r"penalty\.cut_off: .*greater than or equal to 0"),
        ("penalty.copy=0.1", r"penalty\.copy\b.*copied"),
    ],
)
def test_wrong_costs_are_one_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(CONFIG, [override])
    assert "\n" not in str(error.value)


def test_a_reward_with_a_part_of_that_name_is_refused_only_where_penalties_are_on() -> None:
    kind = f"reward.kind={__name__}:PenalisingReward"
    assert load_config(CONFIG, [kind]).reward.maxima == {PENALTY: 1.0}
    with pytest.raises(ConfigError, match=r"penalty: the reward .* has a part 'penalty' of its own; rename that part"):
        load_config(CONFIG, [kind, "penalty.copied=0.1"])


class PenalisingReward(WritingReward):
    """Has a part with the name that penalties use."""

    part_maxima: ClassVar[Mapping[str, float]] = {PENALTY: 1.0}
