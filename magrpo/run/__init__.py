"""The run directory on disk.

Begin with :mod:`magrpo.run.layout`, the steps of a run and the files of each. :mod:`~magrpo.run.store` commits the
output of a stage as a whole or not at all; :mod:`~magrpo.run.manifest` holds the digests by which damage is found, and
:mod:`~magrpo.run.lock` admits one process at a time. :mod:`~magrpo.run.config_diff` compares configurations.
"""
