"""The names that the parts of a reward may have.

A part ``tests`` becomes the metrics ``reward/tests`` and ``eval/tests`` and a quantity of every evaluation. A part with
the name of one of the project's own metrics or quantities would replace it.
"""

import re
from collections.abc import Iterable

from magrpo.checks.calls import PluginCall
from magrpo.errors import check_name

RESERVED_PARTS = frozenset(
    {
        *("return", "response_tokens", "generated_tokens"),  # of every evaluation: eval/<quantity>
        *("seconds", "tokens_per_s", "common", "votes"),  # of tables of baselines
        *("joint", "masked_frac", "frac_groups_equal"),  # of every iteration: reward/<quantity>
        "reward",  # of a trace, beside its parts
    }
)
"""Names of the project's own quantities, which stand beside the parts of a reward."""
RESERVED_PATTERN = re.compile(r"pass_at_.*|joint_turn_.*|.*_constant")
"""Matches families of such names; ``<part>_constant`` says whether a part never varied."""
_SIGNS = "_-. "
"""Signs that MLflow accepts in the keys of metrics, except ``:`` and ``/``, which would begin another family."""


def check_part_names(names: Iterable[str], call: PluginCall) -> None:
    """Raise ConfigError if the parts that ``call`` returned may not have these names."""
    for name in names:
        if name.lower() in RESERVED_PARTS or RESERVED_PATTERN.fullmatch(name.lower()):
            raise call.refuse(f"names a part {name!r}", "metrics of magrpo have that name: choose another one")
        check_name(name, call.describe("names a part:"), signs=_SIGNS)
