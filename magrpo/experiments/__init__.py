"""Runs derived from other runs: evaluations, tables of baselines, and sweeps over settings and seeds.

Begin with :mod:`magrpo.experiments.derive`.
"""
