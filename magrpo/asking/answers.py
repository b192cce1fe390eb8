"""The answer of a team to one problem: the text of each agent, the joined program, its tests and its reward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magrpo.asking.teams import UNTRAINED, AskedTeam
from magrpo.checks.rewards import request_executions
from magrpo.checks.runners import open_engine_plugin, open_sandbox, serve_weights
from magrpo.config.agents import start_weights
from magrpo.config.sections import RolloutConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import Sandbox, Served
from magrpo.model.host import EngineHost
from magrpo.rewards.common import choose_program, choose_report
from magrpo.rewards.program import extract_module, parse_source
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import Node, child_node, rollout, sampling_params
from magrpo.stages.score import score
from magrpo.types import (
    PENDING,
    ExecutionReport,
    JointReward,
    Problem,
    RolloutGroup,
    SamplingParams,
    ScoredTurn,
    TrajectoryStep,
    Turn,
)

if TYPE_CHECKING:
    from magrpo.gateway.player import EpisodePlayer
    from magrpo.model.lineup import Lineup

NO_TESTS = "no tests: reward not measured"
INCOMPLETE = "other agents write next: reward not measured yet"
SANDBOX_FAILED = "the sandbox failed: reward not measured"
TEST_FAILED = "the problem's test cannot be run: reward not measured"
_ALIGNED = RolloutConfig(joint_mode="aligned")


@dataclass(frozen=True, slots=True)
class Answer:
    """One joint answer. ``texts``: the latest text of each agent, by name."""

    problem: Problem
    steps: tuple[TrajectoryStep, ...]
    """The turns taken; the reward of an unmeasured turn is :data:`magrpo.types.PENDING`."""
    program: str
    """The program made of the texts; empty if there is none."""
    unmeasured: str = ""
    """The reason why the reward was not measured; empty if it was."""

    @property
    def texts(self) -> dict[str, str]:
        return {agent: action.text for step in self.steps for agent, action in step.latest_actions.items()}

    @property
    def cut_at(self) -> dict[str, int]:
        """The length in tokens, by agent, of each latest text that was cut off."""
        latest = {agent: action for step in self.steps for agent, action in step.latest_actions.items()}
        return {agent: len(one.token_ids) for agent, one in latest.items() if one.finish_reason == "length"}

    @property
    def reward(self) -> JointReward:
        """The reward of the last turn."""
        return self.steps[-1].turn.reward

    @property
    def reports(self) -> dict[str, ExecutionReport]:
        """The reports of the programs that ran in the last turn."""
        return self.steps[-1].turn.reports

    @property
    def report(self) -> ExecutionReport | None:
        """The report of the joined program that passed the most tests; None if nothing ran."""
        return choose_report(self.reports)

    def explain_missing_program(self, author: str) -> str:
        """Explain why the texts form no runnable program. ``author``: the agent that was asked for the function."""
        wanted = self.problem.entry_point
        source = extract_module(self.texts.get(author, ""), wanted, self.problem.prompt).source
        functions = [node.name for node in parse_source(source).body if isinstance(node, ast.FunctionDef)]
        if wanted in functions:
            return f"no runnable program: `{wanted}` of `{author}` returns nothing"
        names = " and ".join(f"`{name}`" for name in functions)
        wrote = f"wrote {names}" if functions else "wrote no function that compiles"
        return f"no runnable program: `{author}` was asked for `{wanted}` and {wrote}"


@dataclass(frozen=True)
class AskedAgents:
    """A team whose agents are loaded, with the engine and the sandbox they need."""

    trained: Team
    untrained: Team | None
    """The same agents before training; None if they are not loaded."""
    engine: Served
    sandbox: Sandbox
    lineup: Lineup
    rollout: RolloutConfig
    player: EpisodePlayer | None = None
    """Plays the episodes of a program; None if the environment is not a program."""

    def read_prompts(self, step: TrajectoryStep) -> dict[str, str]:
        """The first prompt of each agent that acts in a step, as its model reads it, with special tokens."""
        prompts = {agent: step.prompts[agent].token_ids for agent in step.actions}
        if step.episode is not None:
            for number, call in enumerate(step.episode.calls):
                prompts.setdefault(call.agent, step.episode.prompt_ids(number))
        return {agent: str(self.lineup.tokenizer(agent).decode([*ids])) for agent, ids in prompts.items()}

    def answer_problem(self, team: Team, problem: Problem, seed: int | None = None) -> Iterator[Answer]:
        """Yield the answer of ``team`` after each turn; greedy, or sampled with ``seed``.

        If programs have no tests, the answer ends with the first turn by which every role has written, since further
        turns need feedback.

        Raises:
            ConfigError: a prompt is too long, or a service that the environment asks does not answer.
        """
        prefix = UNTRAINED if team is self.untrained else ""
        greedy = SamplingParams(temperature=0.0, max_new_tokens=self.rollout.max_new_tokens)
        sampling = greedy if seed is None else replace(sampling_params(self.rollout), keep_support=False)
        backend = Backend(engine=self.engine, sandbox=self.sandbox, render=self.lineup.render, player=self.player)
        node = Node(problem, (), (), sampling, 1)
        steps: tuple[TrajectoryStep, ...] = ()
        for _ in range(team.env.num_turns):
            try:
                [group] = rollout([node], team, backend, _ALIGNED, seed or 0)
            except ConnectionError as error:  # a service that the environment asks
                raise ConfigError(str(error)) from None
            texts = {team.roles[agent]: text for agent, text in group.latest(group.turns[0]).items()}
            has_texts = len(texts) == len(team.roles)
            if group.episodes:
                texts, has_texts = group.episodes[0].texts, group.episodes[0].is_priced_by_texts
            wanted = request_executions(team.reward, problem, texts, {}) if has_texts else {}
            if wanted and not (problem.test or problem.hidden_test):
                waiting = [ScoredTurn(turn.picks, PENDING, {}) for turn in group.turns]
                steps = (*steps, _make_step(group, waiting[0], prefix))
                yield Answer(problem, steps, next(iter(wanted.values())).source, NO_TESTS)
                return
            [scored], _ = score([group], team, self.sandbox, backend.cache)
            turn = scored.turns[0]
            steps = (*steps, _make_step(group, turn, prefix))
            unmeasured = _say_failed(group) or _say_unmeasured(turn)
            chosen = choose_program(wanted, turn.reports)
            yield Answer(problem, steps, wanted[chosen].source if chosen else "", unmeasured)
            if turn.masked:
                return
            node = child_node(scored, 0, sampling, 1)


def _say_failed(group: RolloutGroup[Turn]) -> str:
    """How the program of an episode failed; empty if it finished, or if there is none."""
    if not group.episodes or group.episodes[0].status == "finished":
        return ""
    return f"the program {group.episodes[0].status}: {group.episodes[0].message}"


def _say_unmeasured(turn: ScoredTurn) -> str:
    """The reason why a turn has no reward; empty if it has one."""
    if turn.masked:
        failed = any("infra_error" in report.statuses for report in turn.reports.values())
        return SANDBOX_FAILED if failed else TEST_FAILED
    return INCOMPLETE if turn.reward == PENDING else ""


@contextmanager
def open_asked_agents(asked: AskedTeam, *, with_untrained: bool = True) -> Iterator[AskedAgents]:
    """Load the agents of ``asked``, trained and perhaps untrained as well, and open the engine and the sandbox.

    Raises:
        ConfigError: the base model, the weights or the device cannot be used here.
        SandboxError: no accepted isolation level works here.
    """
    from magrpo.gateway.player import open_player  # aiohttp
    from magrpo.model.policy import Policy  # torch and transformers

    config = asked.trained_agents()
    untrained = None
    agents = config.agents
    if with_untrained and asked.weights:
        untrained = asked.untrained_agents()
        agents = (*agents, *untrained.agents)
    policy = Policy.open(agents, config.model, config.lora, config.train.seed)
    host = EngineHost.of(policy)
    with (
        closing(open_sandbox(config.sandbox)) as sandbox,
        closing(open_engine_plugin(config.engine, host)) as engine,
        open_player(config.env, policy.lineup) as player,
    ):
        yield AskedAgents(
            trained=Team.of(config).tolerate_failures(),  # the answer says that its program failed
            untrained=None if untrained is None else Team.of(untrained).tolerate_failures(),
            engine=serve_weights(engine, 0, start_weights(agents)),
            sandbox=sandbox,
            lineup=policy.lineup,
            rollout=config.rollout,
            player=player,
        )


def _make_step(group: RolloutGroup[Turn], turn: ScoredTurn, prefix: str) -> TrajectoryStep:
    """Make the step of a joint action, with agents named without ``prefix``."""
    prompts = {agent.removeprefix(prefix): prompt for agent, prompt in group.prompts.items()}
    actions = {agent.removeprefix(prefix): group.actions[agent][i] for agent, i in turn.picks.items()}
    episode = None
    for played in group.episodes:
        calls = (replace(call, agent=call.agent.removeprefix(prefix)) for call in played.calls)
        episode = replace(played, calls=tuple(calls))
    return TrajectoryStep(prompts, actions, turn, episode)
