"""Trained agents for people who have nothing else of a run: a folder with a model card, merged models, the hub."""
