"""A training run without Prefect: the loop, its stages, and the resources that stages share.

Begin with :mod:`magrpo.training.one_iteration`, a whole iteration on one page. :mod:`~magrpo.training.execute` runs or
resumes a run directory: :mod:`~magrpo.training.loop` walks through its steps, and :mod:`~magrpo.training.stages`
computes each step with the parts that :mod:`~magrpo.training.resources` opens. :mod:`~magrpo.training.recorder` reports
to the tracker; :mod:`~magrpo.training.promotion` registers the trained team; :mod:`~magrpo.training.closing` prints the
result.
"""
