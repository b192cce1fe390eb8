"""Episodes in the stages: rollout by a scripted player, score, penalty and evaluation; what programs may return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from magrpo.algo.answers import answer_metrics
from magrpo.config.agents import AgentConfig
from magrpo.config.run import BaselineRow, load_config
from magrpo.config.sections import AlgoConfig, EvalConfig, PenaltyConfig, RolloutConfig
from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError, PluginFailed
from magrpo.gateway.player import EpisodePlayer, PlayedEpisode, Services
from magrpo.gateway.sessions import EpisodeTask
from magrpo.interfaces import Reward
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.returned import ReturnedReward
from magrpo.rewards.writing import WritingReward
from magrpo.run.files import GROUPS, read_groups, read_scored, write_scores
from magrpo.run.store import write_records
from magrpo.stages.backend import Backend, Team
from magrpo.stages.baseline import time_answers
from magrpo.stages.episodes import episode_metrics
from magrpo.stages.evaluate import evaluate
from magrpo.stages.rollout import measure_groups, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import (
    PENALTY,
    Action,
    Call,
    EpisodeStatus,
    Execution,
    ExecutionReport,
    JointReward,
    Problem,
    RolloutGroup,
    ScoredTurn,
    TimedAnswer,
    Turn,
)
from tests.fakes import PassReward, ScriptedEngine, ScriptedSandbox, render
from tests.stages.crediting import credit_with

AGENTS = (
    AgentConfig(name="p", role="planner", model="m"),
    AgentConfig(name="c", role="coder", model="m"),
)
WELL = {"helper": "ab", "main": "c"}


def make_call(agent: str, text: str = "words", *, is_cut: bool = False, **overruled: float) -> Call:
    message = {"role": "user", "content": f"{agent}?"}
    action = Action(agent, text, (1, 2), (-1.0, -1.0), "length" if is_cut else "stop", 0)
    return Call(agent, -1, (5, 6), (message,), action, overruled)


def made(result: Any, status: EpisodeStatus = "finished", calls: Sequence[Call] = (make_call("p"),)) -> PlayedEpisode:
    is_finished = status == "finished"
    return PlayedEpisode(tuple(calls), status, "" if is_finished else f"it {status}", result if is_finished else None)


@dataclass
class ScriptedPlayer:
    """Returns prepared episodes, over and over."""

    episodes: Sequence[PlayedEpisode]
    tasks: list[EpisodeTask] = field(default_factory=list)

    def play(self, tasks: Sequence[EpisodeTask], services: Services) -> list[PlayedEpisode]:
        self.tasks += tasks
        assert dict(services.agents) == {"planner": "p", "coder": "c"}
        services.advance(len(tasks))
        return [self.episodes[task.index % len(self.episodes)] for task in tasks]


def make_team(reward: Reward | None = None, penalty: PenaltyConfig | None = None, **fields: Any) -> Team:
    """A team that writes texts for :class:`PassReward` unless there is another reward."""
    writes = ("helper", "main") if reward is None else ()
    env = AgentProgram(run="my:program", **{"writes": writes, **fields})
    return Team(AGENTS, env, reward or PassReward(), penalty or PenaltyConfig())


def make_backend(*episodes: PlayedEpisode, status: str = "pass") -> Backend:
    """A backend whose player plays these episodes over and over and whose sandbox gives every program ``status``."""
    return Backend(
        engine=ScriptedEngine(lambda _: ""),
        sandbox=ScriptedSandbox(lambda _: status),
        render=render,
        player=cast(EpisodePlayer, ScriptedPlayer(episodes)),
    )


def play(team: Team, *episodes: PlayedEpisode, num_problems: int = 1) -> list[RolloutGroup[Turn]]:
    config = RolloutConfig(group_size=len(episodes))
    problems = [Problem(f"task/{n}", "") for n in range(num_problems)]
    return rollout(root_nodes(problems, config), team, make_backend(*episodes), config, 3)


def score_one(team: Team, *episodes: PlayedEpisode, status: str = "pass") -> Sequence[ScoredTurn]:
    groups = play(team, *episodes)
    [group], _ = score(groups, team, ScriptedSandbox(lambda _: status), {})
    return group.turns


# ------------------------------------------------------------------------------------------------------------ rollout
def test_each_problem_has_its_episodes() -> None:
    team = make_team()
    groups = play(team, made(WELL), made({"main": "x", "helper": "y"}), num_problems=2)
    assert [group.problem.task_id for group in groups] == ["task/0", "task/1"]
    for group in groups:
        assert [episode.texts for episode in group.episodes] == [WELL, {"helper": "y", "main": "x"}]
        assert [turn.picks for turn in group.turns] == [{}, {}]
        assert (group.path, group.actions, group.prompts) == ((), {}, {})


def test_tasks_hold_what_seeds_are_derived_from() -> None:
    backend = make_backend(made(WELL))
    config = RolloutConfig(group_size=2, temperature=0.7)
    progress: list[int] = []
    rollout(
        root_nodes([Problem("a", ""), Problem("b", "")], config),
        make_team(),
        replace(backend, progress=progress.append),
        config,
        9,
    )
    tasks = cast(ScriptedPlayer, backend.player).tasks
    assert [(task.problem.task_id, task.index, task.seed) for task in tasks] == [
        ("a", 0, 9),
        ("a", 1, 9),
        ("b", 0, 9),
        ("b", 1, 9),
    ]
    assert {task.sampling.temperature for task in tasks} == {0.7}
    assert progress == [4]


@pytest.mark.parametrize(
    "result", ["text", None, 5, [], {}, {"helper": "a"}, {**WELL, "other": "b"}, {"helper": "a", "main": 5}]
)
def test_texts_of_the_wrong_roles_are_a_failure(result: Any) -> None:
    [group] = play(make_team(max_failed_frac=1.0), made(result))
    [episode] = group.episodes
    assert (episode.status, episode.texts) == ("failed", {"helper": "", "main": ""})
    assert "it must return a dict with a text for each of the roles helper, main (env.writes)" in episode.message
    assert len(episode.calls) == 1


def test_a_program_of_one_role_may_return_its_text() -> None:
    env = AgentProgram(run="my:program", writes=("main",))
    [group] = play(Team(AGENTS, env, PassReward()), made("text"), made({"main": "other \ud800"}))
    assert [episode.texts for episode in group.episodes] == [{"main": "text"}, {"main": "other �"}]


def test_too_many_failures_end_the_run_with_their_reasons() -> None:
    team = make_team(max_failed_frac=0.5)
    well, fails = made(WELL), made(None, "failed")
    play(team, well, fails)
    with pytest.raises(PluginFailed) as raised:
        play(team, well, fails, fails, made(None, "timed_out"), made(None, "silent", ()), made(5))
    assert str(raised.value).splitlines() == [
        "env.run = 'my:program': 5 of 6 episodes failed, more than env.max_failed_frac = 0.5; the most frequent "
        "reasons:",
        "  2 x failed: it failed",
        "  1 x timed_out: it timed_out",
        "  1 x silent: it silent",
    ]
    play(team, *[made(None, "infra_error")] * 3), "which says nothing about the program"


def test_metrics_say_how_episodes_ended() -> None:
    calls = [make_call("p", temperature=0.0), make_call("c"), make_call("c", is_cut=True)]
    groups = play(
        make_team(max_failed_frac=1.0),
        made(WELL, calls=calls),
        made(None, "failed"),
        made(None, "timed_out"),
        made(None, "silent", ()),
    )
    assert episode_metrics(groups) == {
        "rollout/failed_frac": 0.25,
        "rollout/timed_out_frac": 0.25,
        "rollout/silent_frac": 0.25,
        "rollout/calls": 1.25,
        "rollout/overruled_frac": 0.2,
    }
    assert answer_metrics(groups)["rollout/c/cut_off_frac"] == 0.5
    assert measure_groups(groups)["rollout/cut_off_frac"] > 0
    chosen = [replace(call, ends_early=True) for call in calls]
    groups = play(make_team(), made(WELL, calls=chosen))
    assert answer_metrics(groups)["rollout/c/cut_off_frac"] == 0, "the program chose where its answers end"
    assert measure_groups(groups)["rollout/cut_off_frac"] == 0
    assert episode_metrics([]) == {}


# -------------------------------------------------------------------------------------------------------------- score
def test_texts_are_priced_by_the_reward() -> None:
    backend_saw: list[Execution] = []

    def run(execution: Execution) -> str:
        backend_saw.append(execution)
        return "pass"

    team = make_team()
    groups = play(team, made(WELL))
    [group], _ = score(groups, team, ScriptedSandbox(run), {})
    [turn] = group.turns
    assert (turn.reward.total, turn.masked) == (2.0, False)
    assert [execution.source for execution in backend_saw] == ["abc", "c"]


@pytest.mark.parametrize("status", ["failed", "timed_out", "silent"])
@pytest.mark.parametrize("reward", [None, ReturnedReward(maxima={"first": 1.0, "second": 1.0})])
def test_failures_have_a_price(status: EpisodeStatus, reward: Reward | None) -> None:
    team = make_team(reward, failure_reward=-0.5, max_failed_frac=1.0)
    [turn] = score_one(team, made(None, status))
    assert turn == ScoredTurn({}, JointReward(-0.5, {"first": 0.0, "second": 0.0}), {}, masked=False)


def test_failures_of_the_infrastructure_are_masked() -> None:
    team = make_team(failure_reward=-0.5)
    turns = score_one(team, made(WELL), made(None, "infra_error"))
    assert [(turn.masked, turn.reward.total) for turn in turns] == [(False, 2.0), (True, 0.0)]
    assert score_one(team, made(WELL), status="infra_error")[0].masked, "also those of the sandbox in the score stage"


def test_returned_rewards_pass_through() -> None:
    team = make_team(ReturnedReward())
    turns = score_one(team, made(0.5), made({"reward": 0.25, "local": {"planner": 1.0, "coder": -1}}))
    assert [turn.reward for turn in turns] == [
        JointReward(0.5, {"outcome": 0.5}),
        JointReward(0.25, {"outcome": 0.25}, {"p": 1.0, "c": -1.0}),
    ]
    samples, _ = credit_with(
        [RolloutGroup(Problem("t", ""), (), (), {}, {}, tuple(turns), play(team, made(0.5), made(0.25))[0].episodes)],
        AlgoConfig(),
        ["p", "c"],
    )
    assert [sample.returns for sample in samples["p"]] == [0.5, 1.25]


def test_local_rewards_of_roles_without_an_agent_are_refused() -> None:
    team = make_team(CodingReward(local_weight=1.0), writes=("helper", "main"))
    with pytest.raises(ConfigError, match=r"roles helper, main local rewards.*: planner, coder; .*agents\.N\.role"):
        score_one(team, made({"helper": "", "main": "def f(): return 1"}))


def test_a_returned_reward_that_is_refused_is_a_failure() -> None:
    team = make_team(ReturnedReward(), failure_reward=-1.0, max_failed_frac=1.0)
    [group] = play(team, made(7.0))
    assert group.episodes[0].status == "failed"
    assert "at most 1 (reward.maxima)" in group.episodes[0].message
    assert score_one(team, made(7.0))[0].reward.total == -1.0


def test_stored_episodes_are_read_back_alike(tmp_path: Path) -> None:
    calls = [make_call("p", top_p=0.5), make_call("c")]
    team = make_team(ReturnedReward(), max_failed_frac=1.0)
    episodes = (made({"reward": 0.25, "local": {"planner": 1.0}}, calls=calls), made(None, "failed"))
    groups = play(team, *episodes)
    scored, _ = score(groups, team, ScriptedSandbox(lambda _: "pass"), {})
    for name in ("rollout.0", "score.0"):
        (tmp_path / name).mkdir()
    write_records(tmp_path / "rollout.0" / GROUPS, groups)
    write_scores(tmp_path / "score.0", scored)
    assert list(read_groups(tmp_path / "rollout.0")) == groups
    assert list(read_scored(tmp_path / "score.0")) == scored


# ------------------------------------------------------------------------------------------------------------ penalty
def test_an_agent_costs_what_its_calls_cost_on_average() -> None:
    calls = [make_call("p", is_cut=True), make_call("p"), make_call("c", is_cut=True), make_call("p"), make_call("p")]
    team = make_team(penalty=PenaltyConfig(cut_off=0.4), failure_reward=-0.5, max_failed_frac=1.0)
    charged, silent, failed = score_one(
        team, made(WELL, calls=calls), made(WELL, calls=[make_call("p")]), made(None, "failed", calls)
    )
    # 0.4 / 4 for the planner and 0.4 for the coder, of a maximum of 2.
    assert charged.reward.parts[PENALTY] == pytest.approx(-2 * (0.1 + 0.4))
    assert charged.reward.total == pytest.approx(2.0 - 2 * (0.1 + 0.4))
    assert silent.reward.total == 2.0
    assert failed.reward.total == -0.5, "a failure has its price already"


def test_words_of_the_request_that_are_copied_cost() -> None:
    asked = "one two three four five six seven eight nine ten eleven twelve"
    copied = make_call("p", asked)
    copied = replace(copied, messages=({"role": "user", "content": asked},))
    team = make_team(penalty=PenaltyConfig(copied=0.5))
    turns = score_one(team, made(WELL, calls=[copied]), made(WELL, calls=[make_call("p", asked)]))
    assert [turn.reward.total for turn in turns] == [1.0, 2.0]


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_episodes_are_evaluated() -> None:
    calls = [make_call("p", "first"), make_call("c", "code"), make_call("p", "last", is_cut=True)]
    backend = make_backend(made(WELL, calls=calls), made(None, "failed"))
    team = make_team(failure_reward=0.5, max_failed_frac=0.5)
    splits = {"train": [Problem("a", "")], "test": [Problem("b", ""), Problem("c", "")]}
    config = EvalConfig(num_samples=2)
    report, trajectories = evaluate(team, backend, splits, config, RolloutConfig(temperature=0.8), 1)
    sampled = [row for row in report.rows if row.mode == "sampled"]
    assert [(row.task_id, row.index, row.returns) for row in sampled] == [
        ("b", 0, (2.0,)),
        ("b", 1, (0.5,)),
        ("c", 0, (2.0,)),
        ("c", 1, (0.5,)),
    ]
    first = sampled[0]
    assert first.texts == {"p": "last", "c": "code"}
    assert (first.generated_tokens, first.answers["p"].cut_off, first.answers["c"].cut_off) == (6, True, False)
    assert first.passed == (True,)
    assert report.summary["test/sampled"]["return"].mean == pytest.approx((1.0 + 0.25) / 2)
    assert report.summary["test/greedy"]["return"].mean == 1.0
    assert {task.sampling.temperature for task in cast(ScriptedPlayer, backend.player).tasks} == {0.0, 0.8}
    assert [trajectory.steps[0].episode is not None for trajectory in trajectories] == [True] * 4


def test_a_failed_episode_that_is_timed_costs_its_time_and_the_row_goes_on() -> None:
    env, reward = AgentProgram(run="my:program", writes=("main",)), WritingReward(kind="writing")
    row = BaselineRow(name="naive", title="a program", env=env, reward=reward, agents=AGENTS, max_new_tokens=9)
    problems = [Problem("b", ""), Problem("c", "")]
    backend = make_backend(made(None, "silent", ()))
    timed = time_answers(row, backend, problems, EvalConfig(), RolloutConfig(), 1)
    assert timed == [TimedAnswer("b", 0.0, 0), TimedAnswer("c", 0.0, 0)]


def test_masked_episodes_are_left_out_of_an_evaluation() -> None:
    backend = make_backend(made(WELL), made(None, "infra_error"))
    report, _ = evaluate(
        make_team(), backend, {"test": [Problem("b", "")]}, EvalConfig(num_samples=2), RolloutConfig(), 1
    )
    assert [(row.mode, row.index) for row in report.rows] == [("greedy", 0), ("sampled", 0)]


def test_code_that_ran_before_is_run_again_only_if_the_sandbox_failed() -> None:
    seen: list[str] = []

    class AskingPlayer(ScriptedPlayer):
        def play(self, tasks: Sequence[EpisodeTask], services: Services) -> list[PlayedEpisode]:
            one, other, unlucky = Execution("a", "", ""), Execution("b", "", ""), Execution("c", "", "")
            found = services.run_programs([one, other, one, unlucky])
            failed = "pass" if seen.count("c") == 2 else "infra_error"
            assert [report.status for report in found] == ["pass", "timeout", "pass", failed]
            return super().play(tasks, services)

    def run(execution: Execution) -> str:
        seen.append(execution.source)
        if execution.source == "c" and seen.count("c") == 1:
            return "infra_error"
        return "timeout" if execution.source == "b" else "pass"

    config = RolloutConfig(group_size=1)
    cache: dict[Execution, ExecutionReport] = {}
    for _ in range(2):
        backend = Backend(
            engine=ScriptedEngine(lambda _: ""),
            sandbox=ScriptedSandbox(run),
            render=render,
            player=cast(EpisodePlayer, AskingPlayer([made(WELL)])),
            cache=cache,
        )
        rollout(root_nodes([Problem("t", "")], config), make_team(), backend, config, 0)
    assert sorted(seen) == ["a", "b", "c", "c"]


# ------------------------------------------------------------------------------------------------------- configuration
CONFIG = "pipelines/configs/embedded_program.toml"


def test_a_program_that_returns_its_own_reward_needs_two_lines() -> None:
    config = load_config(CONFIG, ["reward={kind='returned'}", "env.writes=[]", "sandbox={kind='none'}"])
    assert config.reward.maxima == {"outcome": 1.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.run=my/program.py:play"], 'env.run: .*name the module, "my.program:play", not its file'),
        (["env.run=../program.py:play"], 'env.run: .*name the module, "program:play", not its file'),
        (["env.run=''"], 'env.run: .*must be "module:function" or a command'),
        (['env.run="echo \'x"'], "env.run: .*cannot be read as a command"),
        (["env.writes=[]"], "env.writes: name the roles whose texts the reward prices"),
        (["reward={kind='returned'}"], "env.writes: .*leave it out if the program returns its own reward"),
        (["env.models={x='nobody'}"], "env.models: nobody is the role of no agent; there are: helper, main"),
        (["env.failure_reward=9.0"], "env.failure_reward = 9 is above the maximum of the reward"),
        (["rollout.joint_mode=crossed"], 'set joint_mode = "aligned" and tree = "chains"'),
        (["rollout.tree=full"], 'set joint_mode = "aligned" and tree = "chains"'),
        (["agents.1.role=helper"], "agents: roles must differ, got helper, helper"),
        (["env.time_limit_s=0"], "env.time_limit_s"),
        (["env.max_calls=0"], "env.max_calls"),
    ],
)
def test_wrong_configurations_are_one_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(CONFIG, overrides)
    assert "\n" not in str(error.value)
