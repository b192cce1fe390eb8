"""Asking trained agents to solve one problem; the command line and the library both use it.

Begin with ``answers.open_asked_agents``, which loads a team and answers problems. ``teams`` finds the team by the name
of a run, a folder or a champion, and ``problems`` makes a problem from a user's words.
"""
