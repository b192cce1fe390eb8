"""Asking trained agents for the answer to one problem, without a terminal.

Begin with ``answers.open_asked_agents``, which loads a team; ``teams`` finds it by the name of a run, a folder or a
champion, and ``problems`` makes a problem of a user's words.
"""
