"""The stages that write checkpoints: ``start`` writes the untrained weights, ``update`` the weights after an update.

The update itself is computed by :mod:`magrpo.updates.updater`, in this process or on many ranks.
"""

from magrpo.stages.context import Metrics, StageContext


def write_untrained(context: StageContext) -> Metrics:
    """Write checkpoint 0: the untrained weights, or the weights that ``start_from`` names."""
    context.resources.updates.begin(context.folder)
    return {"start/gpus": float(context.resources.lineup.device.type == "cuda")}


def write_updated(context: StageContext) -> Metrics:
    """Update every trained agent; write its weights and the optimizer's state."""
    samples, checkpoint = context.inputs
    context.console.expect_items(int(context.store.metrics(samples).get("credit/samples", 0)))
    context.resources.free_gpus()
    samples_folder = context.store.folder(samples)
    checkpoint_folder = context.store.folder(checkpoint)
    return context.resources.updates.update(samples_folder, checkpoint_folder, context.folder, context.advance)
