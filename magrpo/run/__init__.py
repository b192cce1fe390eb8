"""The run directory on disk.

Begin with :mod:`magrpo.run.steps`: the stages of a run, and its steps in their order. :mod:`~magrpo.run.files` names
the files of each step and reads them. :mod:`~magrpo.run.store` commits the output of a step as a whole or not at all.
"""
