"""Rewards: the prices of joint actions, from the texts of agents and the reports of the programs that ran.

Begin with :mod:`magrpo.rewards.coding`; ``relay`` chains functions; ``writing`` runs nothing. ``program`` joins
completions into one program, ``usage`` judges by its syntax tree whether the agents cooperate, ``stand_ins`` holds
functions that replace one agent's work in variants of the program, and ``common`` holds the base classes.
"""
