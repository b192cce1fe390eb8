"""Trained agents for people who have nothing else of a run.

Begin with ``agents_folder``, which writes the folder that others get. ``team`` says which checkpoint that is,
``model_card`` and ``sample`` write its card, ``merging`` merges adapters into their base, ``hub`` uploads the folder.
"""
