"""Exporting trained agents to people who have nothing else of a run.

Begin with ``agents_folder``, which writes the folder that others get. ``team`` chooses the checkpoint, ``model_card``
and ``sample`` write the model card, and ``merging`` merges adapters into their base.
"""
