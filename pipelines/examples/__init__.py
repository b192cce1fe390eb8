"""Example programs whose agents ``magrpo`` trains; docs/programs.md describes them. Each is a whole program.

Begin with ``coop.py``, ten lines in which two programmers answer at once. ``coop_*.py`` are the same with libraries for
agents and with a tool, ``*_program.py`` play environments of other projects, and the others show roles in turn, tools,
and a model that is not trained. A configuration names a program as ``env.run``.
"""
