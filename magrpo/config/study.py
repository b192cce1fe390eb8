"""The file of a study: arms, seeds, budget and outcome, fixed before the first run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from magrpo.errors import check_name
from magrpo.plugins import Section

OutcomeName = Literal["area_return", "area_pass_at_1", "final_return", "final_pass_at_1"]
OWN_KEYS = ("train.seed", "train.max_tokens", "train.num_iterations", "root")
"""Keys of a run's configuration that follow from the study."""


class Pilots(Section):
    """Runs that choose each arm's learning rate, on seeds that are not reported."""

    seeds: tuple[int, ...] = Field(min_length=1)
    """Seeds of the pilots; none of them may be among the reported seeds."""
    rates: tuple[float, ...] = Field(min_length=1)
    """Candidates for ``optim.lr``. An arm takes the one with the best mean outcome over the pilot seeds."""
    tokens: int | None = Field(None, ge=1)
    """Budget of a pilot. None: that of a reported run."""


class Arm(Section):
    """One way to train: a name, and its changes to the study's configuration."""

    name: Annotated[str, AfterValidator(partial(check_name, longest=40))]
    """Name of the arm in tables and in the names of its runs."""
    set: tuple[str, ...] = ()
    """Changes to the configuration, each written ``section.key=value``."""
    config: str | None = None
    """Configuration of this arm, if another than the study's: a file beside the study's, or a shipped name."""
    rates: tuple[float, ...] | None = Field(None, min_length=1)
    """Candidates for ``optim.lr``, if others than those of the pilots."""


def name_rate(rate: float) -> str:
    """Name a learning rate in the names of pilots: by six digits."""
    return f"{rate:g}"


def name_reported_run(study: str, arm: str, seed: int) -> str:
    """Name the run of an arm with a reported seed."""
    return f"{study}-{arm}-s{seed}"


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a study. ``rate``: its ``optim.lr``; None: that of the configuration, or not chosen yet."""

    run_id: str
    arm: str
    seed: int
    rate: float | None
    is_pilot: bool


class StudyConfig(Section):
    """A whole study. Its first arm is the reference."""

    config: str
    """Configuration of the runs: a file, named relative to the study's file, or a shipped name."""
    outcome: OutcomeName
    """The primary outcome on held-out problems. ``area``: the mean over the tokens of training, which is the area under
    the learning curve over the budget; ``final``: the last evaluation. Of the joint ``return`` or of ``pass_at_1``."""
    tokens: int = Field(ge=1)
    """Budget of a run: training ends after the first iteration by which it has generated this many tokens."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """Reported seeds. Every arm trains with each of them, and arms are compared seed by seed."""
    set: tuple[str, ...] = ()
    """Changes to the configuration in all arms, each written ``section.key=value``."""
    pilots: Pilots | None = None
    """How the learning rates are chosen. None: each arm trains at the rate of its configuration."""
    arms: tuple[Arm, ...] = Field(min_length=1)

    @property
    def quantity(self) -> str:
        """``return`` or ``pass_at_1``."""
        return self.outcome.partition("_")[2]

    @property
    def is_area(self) -> bool:
        """Whether the outcome is an area under the learning curve."""
        return self.outcome.startswith("area_")

    @property
    def pilot_tokens(self) -> int:
        """Budget of a pilot."""
        return (self.pilots and self.pilots.tokens) or self.tokens

    def list_rates(self, arm: Arm) -> list[float]:
        """List the candidates for the learning rate of an arm; none: that of its configuration is used."""
        return [] if self.pilots is None else list(dict.fromkeys(arm.rates or self.pilots.rates))

    @model_validator(mode="after")
    def _is_a_protocol(self) -> StudyConfig:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"arms: names must differ, got {', '.join(names)}")
        pilots = self.pilots
        for title, seeds in (("seeds", self.seeds), ("pilots.seeds", pilots.seeds if pilots else ())):
            if len(set(seeds)) < len(seeds) or min(seeds, default=0) < 0:
                raise ValueError(f"{title}: must be different numbers, 0 or more")
        if pilots and (shared := sorted(set(pilots.seeds) & set(self.seeds))):
            raise ValueError(
                f"pilots.seeds: {', '.join(map(str, shared))} are reported seeds; a learning rate must be chosen on "
                "other seeds than those it is reported with"
            )
        for arm in self.arms:
            if arm.rates is not None and pilots is None:
                raise ValueError(f"arm {arm.name!r}: rates needs the section pilots, whose seeds choose among them")
            by_name: dict[str, float] = {}
            for rate in self.list_rates(arm):
                if (other := by_name.setdefault(name_rate(rate), rate)) != rate:
                    raise ValueError(
                        f"arm {arm.name!r}: the candidates {other} and {rate} of rates are both {name_rate(rate)} in "
                        "the names of their runs; give them at most six digits"
                    )
            for change in (*self.set, *arm.set):
                key = change.partition("=")[0].strip()
                if key in OWN_KEYS:
                    raise ValueError(f"arm {arm.name!r}: {key} cannot be set; it follows from seeds, tokens and --root")
                if key == "optim.lr" and pilots is not None:
                    raise ValueError(f"arm {arm.name!r}: optim.lr cannot be set; the pilots choose it, among rates")
        return self
