"""Environments: roles, prompts and what happens between turns."""
