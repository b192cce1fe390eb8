"""The baselines of section 5 of arXiv 2508.04652 and cross-play; each entry of a table is one baseline.

An entry lists its differences from the run it is compared with: who writes when, fields of the environment, and which
agent takes each role with which weights. Rows that cannot be made for a run are left out, with the reason.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from magrpo.checks.envs import count_priced_turns
from magrpo.config.agents import AgentConfig
from magrpo.config.run import REFERENCE, BaselineRow, RunConfig
from magrpo.config.validate import validate_config
from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError, list_choices
from magrpo.interfaces import EnvPlugin
from magrpo.plugins import TABLES, import_plugin


class LeftOut(Exception):
    """A row cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class RunTeam:
    """The agents of a run, before or after training."""

    name: str
    agents: tuple[AgentConfig, ...]

    def agents_for(self, roles: Sequence[str]) -> list[AgentConfig]:
        """Return the agents for ``roles``, in that order; the last agent (``main`` in coding) fills a single role."""
        by_role = {agent.role: agent for agent in self.agents}
        if len(roles) == 1:
            return [by_role.get(roles[0], self.agents[-1])]
        missing = [role for role in roles if role not in by_role]
        if missing:
            raise LeftOut(f"{self.name} has no agent in the role {missing[0]!r}")
        return [by_role[role] for role in roles]

    def partners_for(self, roles: Sequence[str]) -> list[AgentConfig]:
        """Return the agents for ``roles`` like :meth:`agents_for`. Raises LeftOut if there is only one agent."""
        agents = self.agents_for(roles)
        if len(agents) == 1:
            raise LeftOut("a single agent has no partner")
        return agents


@dataclass(frozen=True, slots=True)
class Teams:
    """The teams whose agents can fill the rows. ``run``: the run after training, None for a configuration file."""

    source: str
    untrained: RunTeam
    run: RunTeam | None
    single: RunTeam | None
    partners: tuple[RunTeam, ...]

    @property
    def trained(self) -> RunTeam:
        """Return the run's team after training. Raises LeftOut if there is none."""
        if self.run is None:
            raise LeftOut(f"{self.source} is a configuration, not a run: its agents are not trained")
        return self.run


Seating = Literal["untrained", "run", "single", "swap", "solo", "untrained_partner", "partners"]


def seat_agents(
    seating: Seating, teams: Teams, roles: Sequence[str]
) -> Iterator[tuple[str, str, Sequence[AgentConfig]]]:
    """Yield for each row the additions to the entry's name and title, and the agents in the order of the roles."""
    match seating:
        case "untrained":
            yield "", "", teams.untrained.agents_for(roles)
        case "run":
            yield "", "", teams.trained.agents_for(roles)
        case "single":
            if teams.single is None:
                raise LeftOut("needs a run that trained a single agent: --single-run RUN")
            yield "", f" ({teams.single.name})", teams.single.agents_for(roles)
        case "swap":
            first, *others = teams.trained.partners_for(roles)
            yield "", "", [*others, first]
        case "solo":
            for agent in teams.trained.partners_for(roles):
                yield f"_{agent.name}", f": {agent.name} in every role", [agent] * len(roles)
        case "untrained_partner":
            for index, agent in enumerate(teams.trained.partners_for(roles)):
                seats = teams.untrained.agents_for(roles)
                seats[index] = agent
                yield f"_{agent.name}", f": {agent.name} trained, partner untrained", seats
        case "partners":  # the first role of one run plays with the other roles of another
            if not teams.partners:
                raise LeftOut("needs another run: --partner RUN")
            teams.trained.partners_for(roles)
            pairs = itertools.product([teams.trained, *teams.partners], repeat=2)
            for one, other in itertools.islice(pairs, 1, None):  # skip the first pair: it is the run itself
                seats = [*one.agents_for(roles)[:1], *other.agents_for(roles)[1:]]
                yield f"_{one.name}_{other.name}", f": {one.name} with {other.name}", seats


@dataclass(frozen=True, slots=True)
class Family:
    """The plug-ins of one family of tasks, by who writes when. Environment and reward of ``alone`` have one kind."""

    rewards: tuple[str, ...]
    at_once: str
    in_turn: str
    alone: str
    runs_programs: bool
    """Whether answers are programs, of which a majority can behave alike."""


FAMILIES = (
    Family(("coding", "solo", "team"), "coding", "sequential", "solo", runs_programs=True),
    Family(("relay", "relay_solo"), "relay", "relay_in_turn", "relay_solo", runs_programs=True),
    Family(("writing", "writing_solo"), "writing", "writing_sequential", "writing_solo", runs_programs=False),
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """An entry: how its rows differ from the run."""

    title: str
    seating: Seating
    env: Mapping[str, Any] = field(default_factory=dict)
    order: Literal["own", "at_once", "in_turn", "alone"] = "own"
    """Who writes when: as in the run; all agents at the same time, even where the run's agents take turns; one after
    the other; or one agent that writes everything."""
    votes: Literal["none", "majority", "best"] = "none"
    oracle: Literal["none", "stop", "retry"] = "none"
    """``stop``: end a trajectory where its reward exceeds ``eval.stop_above`` (None: where it is largest).
    ``retry``: do the same, but start again where it does not, until there are as many tries as the run has turns."""
    shuffled: bool = False
    """Whether each agent sees the texts that its partners wrote on another problem."""


ONE_ANSWER = {"num_turns": 1, "feedback": "plain"}
"""Fields of an agent that writes alone: without a second turn it gets no feedback."""
TRAINED = "trained team"
"""Stands in titles for the method that trained the run's agents, which only a run has."""
BASELINES: dict[str, Baseline] = {
    "single": Baseline("single agent", "untrained", ONE_ANSWER, "alone"),
    "single_grpo": Baseline("single agent, GRPO", "single", ONE_ANSWER, "alone"),
    "naive": Baseline("naive concatenation", "untrained", {"num_turns": 1}, "at_once"),
    "sequential": Baseline("sequential pipeline", "untrained", {"num_turns": 2}, "in_turn"),
    "discussion": Baseline(
        "one-round discussion", "untrained", {"feedback": "discussion", "num_turns": 2}, order="at_once"
    ),
    "magrpo": Baseline(TRAINED, "run"),
    "one_turn": Baseline(f"{TRAINED}, one turn", "run", {"num_turns": 1}),
    "two_turns": Baseline(f"{TRAINED}, two turns", "run", {"num_turns": 2}),
    "no_message": Baseline(f"{TRAINED}, no message", "run", {"message": "none"}),
    "shuffled_message": Baseline(f"{TRAINED}, message of another problem", "run", shuffled=True),
    "oracle_stop": Baseline(f"{TRAINED}, oracle stop", "run", oracle="stop"),
    "retry": Baseline(f"{TRAINED}, one turn, retry (oracle)", "run", {"num_turns": 1}, oracle="retry"),
    "voting": Baseline("voting, single agent", "untrained", ONE_ANSWER, "alone", "majority"),
    "best_of": Baseline("best of k, single agent (oracle)", "untrained", ONE_ANSWER, "alone", "best"),
    "swap": Baseline("cross-play: roles exchanged", "swap"),
    "solo": Baseline("cross-play", "solo"),
    "untrained_partner": Baseline("cross-play", "untrained_partner"),
    "partners": Baseline("cross-play", "partners"),
}


def parse_names(text: str) -> list[str]:
    """Parse ``--baselines``: ``all``, or names joined by commas; adds the entries they need. Raises ConfigError."""
    names = list(BASELINES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"--baselines {name!r}: {list_choices(name, [*BASELINES, 'all'])}")
    needed = {REFERENCE}
    if any(BASELINES[name].votes != "none" for name in names):
        needed.add("single")
    if "partners" in names:
        needed.add("magrpo")  # the table of cross-play has the run's own team, too
    return [name for name in BASELINES if name in needed or name in names]


def with_baselines(config: RunConfig, names: Sequence[str], teams: Teams) -> RunConfig:
    """Configure a run that makes the table. Raises ConfigError, with reasons, if no row can be made."""
    rows: dict[str, BaselineRow] = {}  # rows by content, so that entries that coincide share one row
    left_out: dict[str, str] = {}
    for name in names:
        try:
            for row in _make_rows(name, config, teams):
                # The reference has a row of its own: all others are compared with it by its name.
                content = name if name == REFERENCE else row.model_dump_json(exclude={"name", "title"})
                first = rows.setdefault(content, row)
                if first is not row:
                    left_out[row.name] = f"the same as {first.name}"
        except LeftOut as reason:
            left_out[name] = str(reason)
        except ValidationError as error:
            left_out[name] = error.errors()[0]["msg"].removeprefix("Value error, ")
    if not rows:
        raise ConfigError("\n".join(f"--baselines {name}: {reason}" for name, reason in left_out.items()))
    tree = json.loads(config.resolved(secrets=True))
    tree["baselines"] |= {"rows": [json.loads(row.model_dump_json()) for row in rows.values()], "left_out": left_out}
    return validate_config(RunConfig, tree, [], "--baselines")


def _make_rows(name: str, config: RunConfig, teams: Teams) -> Iterator[BaselineRow]:
    entry = BASELINES[name]
    env = _change_plugin("env", config.env, {**entry.env, **_choose_env(entry, config)})
    reward = _change_plugin("reward", config.reward, {"kind": env.kind} if entry.order == "alone" else {})
    # A program's agents fill their own roles; those of the environment are the texts that it returns.
    is_program = isinstance(env, AgentProgram)
    roles = tuple(agent.role for agent in config.agents) if is_program else env.roles()
    entry_title = "untrained program" if is_program and name == "naive" else entry.title
    entry_title = entry_title.replace(TRAINED, config.method)
    num_turns = config.env.num_turns
    stop_above = None
    if entry.oracle != "none":
        if num_turns == 1:
            raise LeftOut("the run has a single turn, so there is no later turn to skip or to retry instead")
        if entry.oracle == "stop" and count_priced_turns(env) == 1:
            raise LeftOut("only the last turn of the run is priced, so there is no later turn to skip")
        stop_above = config.eval.stop_above
        if stop_above is None:  # just below the largest reward; fractions are linear in the reward
            least = float(config.reward.fraction(0.0))
            stop_above = (1 - 1e-6 - least) / (float(config.reward.fraction(1.0)) - least)
    if entry.shuffled and num_turns == 1:
        raise LeftOut("the run has a single turn, so no agent sees what its partner wrote")
    if entry.shuffled and _hides_partners(env):
        raise LeftOut("the run's prompts quote no partner, so there is no message to shuffle")
    # A single agent may write as much as all agents together.
    num_writers = len(config.agents) if len(roles) == 1 else 1
    for suffix, title, seats in seat_agents(entry.seating, teams, roles):
        yield BaselineRow(
            name=name + suffix,
            title=entry_title + title,
            env=env,
            reward=reward,
            penalty=config.penalty,
            agents=_load_weights(seats, roles, config.agents),
            max_new_tokens=config.rollout.max_new_tokens * num_writers,
            shuffled=entry.shuffled,
            votes=entry.votes,
            stop_above=stop_above,
            max_tries=num_turns if entry.oracle == "retry" else 1,
        )


def _hides_partners(env: EnvPlugin) -> bool:
    """Whether no prompt of an environment quotes what a partner wrote. Of other people's this is not known: False."""
    fields = env.model_dump()
    if env.kind in {family.in_turn for family in FAMILIES}:
        return fields.get("message") == "none"
    at_once = {kind for family in FAMILIES for kind in (family.at_once, family.alone)}
    return env.kind in at_once and fields.get("feedback") != "discussion"


def _choose_env(entry: Baseline, config: RunConfig) -> dict[str, str]:
    """Return the kind of the environment where it must differ from the run's, else nothing."""
    family = next((one for one in FAMILIES if config.reward.kind in one.rewards), None)
    if entry.order == "at_once":
        return {"kind": family.at_once} if family and config.env.kind == family.in_turn else {}
    if entry.order == "own":
        return {}
    if isinstance(config.env, AgentProgram):
        raise LeftOut("the run's agents are asked by a program, whose prompts no other environment has")
    if family is None:
        known = ", ".join(kind for one in FAMILIES for kind in one.rewards)
        raise LeftOut(f"it needs one of the rewards {known}, not {config.reward.kind}")
    if entry.votes == "majority" and not family.runs_programs:
        raise LeftOut("a majority is a set of programs that behave alike, and texts are not run")
    return {"kind": family.in_turn if entry.order == "in_turn" else family.alone}


def _change_plugin(section: str, plugin: Any, changes: Mapping[str, Any]) -> Any:
    """Return the plug-in with changed fields, or another plug-in with the fields that both have."""
    changes = {key: value for key, value in changes.items() if getattr(plugin, key, None) != value}
    cls = import_plugin(TABLES[section], changes["kind"]) if "kind" in changes else type(plugin)
    unknown = next((key for key in changes if key not in cls.model_fields), None)
    if unknown is not None:
        raise LeftOut(f"{section} {plugin.kind!r} has no field {unknown!r}")
    kept = {key: value for key, value in plugin.model_dump().items() if key in cls.model_fields}
    return cls.model_validate(kept | changes)


def _load_weights(
    seats: Sequence[AgentConfig], roles: Sequence[str], pool: Sequence[AgentConfig]
) -> tuple[AgentConfig, ...]:
    """Return agents of the run that carry the weights of ``seats``: same base, and the same name where it is free.

    Only the run's agents have models, so a row loads adapters or weights into them.
    """
    free, carriers = list(pool), list(seats)
    names = [agent.name for agent in pool]
    for position in sorted(range(len(seats)), key=lambda position: seats[position].name not in names):
        seat = seats[position]
        fitting = [agent for agent in free if (agent.model, agent.weights) == (seat.model, seat.weights)]
        if not fitting:
            raise LeftOut(f"the run has too few agents with the base model {seat.model} ({seat.weights})")
        carrier = next((agent for agent in fitting if agent.name == seat.name), fitting[0])
        carriers[position] = carrier.model_copy(update={"role": roles[position], "start_from": seat.start_from})
        free.remove(carrier)
    return tuple(carriers)
