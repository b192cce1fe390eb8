"""The stages that write checkpoints: ``start`` writes the untrained weights, ``update`` the weights after an update.

The update itself is computed by :mod:`magrpo.updates.updater`, in this process or on many ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from magrpo.errors import ConfigError
from magrpo.model.fingerprint import fingerprint_model
from magrpo.run.files import BASES
from magrpo.run.manifest import check_files
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.stages.context import Metrics, StageContext

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup


def write_untrained(context: StageContext) -> Metrics:
    """Write checkpoint 0: the untrained weights, or those that ``start_from`` names, and fingerprints of the bases."""
    context.resources.open_updates().begin(context.folder)
    lineup = context.resources.lineup
    (context.folder / BASES).write_text(json.dumps(_fingerprint_bases(lineup), indent=1), encoding="utf-8")
    return {"start/gpus": float(lineup.device.type == "cuda")}


def check_bases(store: RunStore, lineup: Lineup) -> None:
    """Raise ConfigError if the files of a base model have changed since the run's ``start``.

    Not known of runs that have not begun, or were begun by a version that did not note the files.
    """
    path = store.stage_folder(Step("start", 0).output) / BASES
    if not path.exists():
        return
    check_files(path.parent, BASES)
    noted = json.loads(path.read_bytes())
    for agent, fingerprint in _fingerprint_bases(lineup).items():
        if noted.get(agent) != fingerprint:
            raise ConfigError(
                f"agent {agent!r}: the files of its base model {lineup.base(agent)} have changed since the run began; "
                f"restore them, or train again from them: {store.format_command('resume')} --from-stage start"
            )


def _fingerprint_bases(lineup: Lineup) -> dict[str, str]:
    """The fingerprint of the base model of each agent, by the agent's name."""
    fingerprints = {base: fingerprint_model(base) for base in {lineup.base(agent) for agent in lineup.agents}}
    return {agent: fingerprints[lineup.base(agent)] for agent in lineup.agents}


def write_updated(context: StageContext) -> Metrics:
    """Update every trained agent; write its weights and the optimizer's state."""
    samples, checkpoint = context.inputs
    context.console.expect_items(int(context.store.metrics(samples).get("credit/samples", 0)))
    context.resources.free_gpus()
    samples_folder = context.store.folder(samples)
    checkpoint_folder = context.store.folder(checkpoint)
    return context.resources.open_updates().update(samples_folder, checkpoint_folder, context.folder, context.advance)
