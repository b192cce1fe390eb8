"""Environments: the roles of agents, their prompts, and the feedback between turns.

Begin with :mod:`magrpo.envs.coding`, the environments of programmers; ``writing`` is that of two authors, ``relay``
that of programmers who see different parts of a problem. The texts of prompts and feedback are in ``prompts.toml``.
``diagnosis`` chooses the feedback on a program of the agents. In ``program``, a program of the user's asks the agents
(:mod:`magrpo.gateway`).
"""
