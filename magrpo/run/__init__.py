"""The run directory on disk.

Begin with :mod:`magrpo.run.layout`, the steps of a run and the files of each. :mod:`~magrpo.run.store` commits the
output of a stage as a whole or not at all.
"""
