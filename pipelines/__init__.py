"""The command line ``magrpo``, and the Prefect flows that execute runs.

Begin with ``cli.py``, which lists the commands. ``commands/`` has a module for each command, ``flows/`` the flows,
``benchmarks/`` the measurements of ``magrpo bench``, and ``configs/`` the shipped configurations. This package imports
:mod:`magrpo`, which knows nothing of it; only this package imports Prefect.
"""
