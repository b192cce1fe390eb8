"""Calls of plug-ins: they check the result at once, so that a mistake is reported where it was made.

Begin with :mod:`~magrpo.checks.calls`, which words the errors. Texts of problems, observations, completions and reports
leave here without lone surrogates (:mod:`magrpo.text`).
"""
