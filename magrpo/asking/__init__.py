"""Asking a team of agents: finding it, writing a problem for it, and its answer."""
