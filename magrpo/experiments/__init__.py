"""Runs derived from other runs: evaluations, tables of baselines, and sweeps over settings and seeds.

Begin with :mod:`magrpo.experiments.derive`, which creates the run of an evaluation or of a table of baselines.
:mod:`~magrpo.experiments.baselines` defines the rows of such a table. :mod:`~magrpo.experiments.sweep_grid` lists the
runs of a sweep; :mod:`~magrpo.experiments.sweep_run` executes and compares them.
"""
