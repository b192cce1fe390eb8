"""The team reward, for several helpers who each propose ``aux``, and a main: that of main with the best helper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import Field

from magrpo.plugins import ConfigError
from magrpo.rewards.coding import CodingReward
from magrpo.types import Execution, ExecutionReport, JointReward, Problem

Texts = Mapping[str, str]
Reports = Mapping[str, ExecutionReport]


class TeamReward(CodingReward):
    """The largest coding reward of ``main`` paired with one of ``helper1``, ``helper2``, ...; the first on ties.

    The team thus gains from proposals that differ, so that one of them fits main. Names of reports end in the helper's
    role, as in ``program:helper2``.
    """

    kind: str = "team"
    num_helpers: int = Field(2, ge=1)
    """Number of helpers; ``env.num_helpers`` must be equal."""

    @property
    def max_executions(self) -> int:
        return self.num_helpers * super().max_executions

    def passed(self, reports: Reports) -> bool:
        """Whether the program with any of the proposals passed every test."""
        return any(super(TeamReward, self).passed(own) for _, own in self._reports_by_helper(reports))

    def executions(self, problem: Problem, texts: Texts, reports: Reports) -> Mapping[str, Execution]:
        """The executions that the coding reward needs for each pair.

        Raises:
            ConfigError: the environment has another number of helpers.
        """
        given = sum(role != "main" for role in texts)
        if given != self.num_helpers:
            raise ConfigError(f"reward.num_helpers = {self.num_helpers}, but env has {given} helpers; make them equal")
        wanted: dict[str, Execution] = {}
        for role, own in self._reports_by_helper(reports):
            for name, execution in super().executions(problem, _pair(texts, role), own).items():
                wanted[f"{name}:{role}"] = execution
        return wanted

    def price(self, problem: Problem, texts: Texts, reports: Reports) -> JointReward:
        """The joint reward of the best pair, with the parts of the coding reward. ``texts`` by role."""
        prices = {
            role: super(TeamReward, self).price(problem, _pair(texts, role), own)
            for role, own in self._reports_by_helper(reports)
        }
        best = max(prices.values(), key=lambda price: price.total)
        local = {role: price.local["helper"] for role, price in prices.items() if price.local}
        return replace(best, local=local | {role: value for role, value in best.local.items() if role == "main"})

    def _reports_by_helper(self, reports: Reports) -> Iterator[tuple[str, Reports]]:
        """Each helper's role with its own reports, under the names that the coding reward uses."""
        for i in range(1, self.num_helpers + 1):
            role = f"helper{i}"
            yield role, {name.removesuffix(f":{role}"): r for name, r in reports.items() if name.endswith(f":{role}")}


def _pair(texts: Texts, role: str) -> Texts:
    return {"helper": texts[role], "main": texts["main"]}
