"""This process and its children: environment variables, signals, disk errors, clean-up.

Begin with :mod:`magrpo.process.environment`, which every command calls before it imports a heavy library.
"""
