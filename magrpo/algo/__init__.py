"""The maths of MAGRPO: functions of numbers and tensors that read no files and know no models.

In the order in which an iteration uses them: ``returns`` (from rewards to the return of each completion),
``advantages`` (estimators) and ``loss``. ``stats`` and ``repetition`` serve evaluations and reports. The equations and
an iteration in numbers are in docs/algorithm.md: begin there.
"""
