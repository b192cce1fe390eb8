"""Updates: from folders of samples and of a checkpoint to the folder of the next checkpoint.

Begin with :mod:`.updater`: it takes the steps, on gradients from :mod:`.gradients`, for the batches of
:mod:`.agent_batch`. :mod:`.inline` updates in the run's own process. :mod:`.rank` is one of several processes that
compute an update together with torch.distributed; :mod:`magrpo.cluster.ranks` starts them.
"""


class UpdatesDied(RuntimeError):
    """A rank of an update died or hung. The message has its number and its error."""
