"""Calling plug-ins, and checking their results at once, so that a mistake is reported where it was made.

There is one module for each kind of plug-in. Begin with :mod:`~magrpo.checks.calls`, which words the errors. The texts
of problems, observations, completions and reports are returned without lone surrogates (:mod:`magrpo.text`).
"""
