"""The stages of an iteration, one module each: pure functions from frozen records to new records.

In order: :mod:`~magrpo.stages.prepare`, :mod:`~magrpo.stages.rollout`, :mod:`~magrpo.stages.score`,
:mod:`~magrpo.stages.credit`, :mod:`~magrpo.stages.update` and :mod:`~magrpo.stages.evaluate`. Begin with ``rollout``;
:mod:`magrpo.training.one_iteration` shows all of them together.
"""
