"""The stages of a run, one module each.

A module holds a pure function from frozen values to new values, such as :func:`magrpo.stages.score.score`, and below it
a writer, which reads the inputs of a step, calls the function and writes the files of the step. Begin with
:mod:`magrpo.stages.rollout`; :mod:`~magrpo.stages.context` has what a writer is given.
"""
