"""This process and its children: environment variables, signals, disk errors, clean-up.

Begin with :mod:`magrpo.process.environment`, which every command calls before it imports a heavy library.
:mod:`~magrpo.process.signals` ends a command on a signal, :mod:`~magrpo.process.faults` describes faults of the machine
with a remedy, and :mod:`~magrpo.process.children` finds and ends child processes.
"""
