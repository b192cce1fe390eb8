"""Runs derived from other runs: evaluations, tables of baselines, and studies.

Begin with :mod:`magrpo.experiments.derive`, which creates the run of an evaluation or of a table of baselines.
:mod:`~magrpo.experiments.baselines` defines the rows of such a table. :mod:`~magrpo.experiments.study` lists the runs
of a study, fixes its protocol and executes it.
"""
