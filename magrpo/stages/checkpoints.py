"""The stages that write checkpoints: ``start`` the untrained weights, ``update`` those after an update.

The update itself is computed by :mod:`magrpo.stages.update`, in this process or on many ranks.
"""

from magrpo.stages.context import Metrics, StageContext


def write_untrained(context: StageContext) -> Metrics:
    """Write checkpoint 0: the untrained weights, or those the agents start from."""
    context.resources.updates.begin(context.folder)
    return {"start/gpus": float(context.resources.lineup.device.type == "cuda")}


def write_updated(context: StageContext) -> Metrics:
    """Update every trained agent; write its weights and the optimizer's state."""
    samples, checkpoint = context.inputs
    context.console.expect_items(int(context.store.metrics(samples).get("credit/samples", 0)))
    context.resources.free_gpus()
    of_samples, of_checkpoint = context.store.folder(samples), context.store.folder(checkpoint)
    return context.resources.updates.update(of_samples, of_checkpoint, context.folder, context.advance)
