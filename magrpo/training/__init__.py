"""A training run without Prefect: the loop, its stages, and the resources that stages share.

Begin with :mod:`magrpo.training.one_iteration`, a whole iteration on one page. :mod:`~magrpo.training.execute` runs or
resumes a run directory, :mod:`~magrpo.training.loop` walks its steps, :mod:`~magrpo.training.stages` computes each.
"""
