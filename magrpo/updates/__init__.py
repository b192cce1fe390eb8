"""Updates: from folders of samples and of a checkpoint to the folder of the next checkpoint."""


class UpdatesDied(RuntimeError):
    """A rank of an update died or hung. The message has its number and last words, and names its log."""
