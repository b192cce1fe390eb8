"""What is known about a run before it begins: whether it fits its place, and how much work and memory it takes.

Begin with ``sizes``, which counts completions, bytes of memory by purpose and bytes on disk; ``magrpo train --dry-run``
prints them. ``card`` says whether a run fits one GPU, and chooses micro-batches that fill it. ``place_check`` checks
that a run can be computed at the place where it is to run, and ``warnings`` names options that have no effect or bias
the gradient. Nothing here loads weights: only configurations of models are read.
"""
