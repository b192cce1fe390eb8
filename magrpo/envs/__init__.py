"""Environments: the roles of agents, their prompts, and the feedback between turns.

Begin with :mod:`magrpo.envs.coding`, the environments of programmers. ``writing`` holds the environments of authors,
``relay`` those of programmers who see different parts of a problem. The texts of prompts and feedback are in
``prompts.toml``. ``diagnosis`` chooses the feedback on a program of the agents. In ``program``, a program that the user
wrote asks the agents (:mod:`magrpo.gateway`).
"""
