"""The run directory on disk.

Begin with :mod:`magrpo.run.steps`: the stages of a run, and its steps in their order. :mod:`~magrpo.run.files` names
the files of each step and reads them. :mod:`~magrpo.run.store` commits the output of a step as a whole or not at all;
:mod:`~magrpo.run.manifest` holds the digests by which damage is found, and :mod:`~magrpo.run.lock` admits one process
at a time. :mod:`~magrpo.run.config_diff` compares configurations.
"""
