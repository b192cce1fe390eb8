"""The maths of MAGRPO: functions of numbers and tensors that read no files and know no models.

An iteration uses ``returns`` (from rewards to the return of each completion), then ``advantages`` (estimators), then
``loss``. Evaluations and reports use ``stats`` and ``repetition``. Begin with docs/algorithm.md, which has the
equations and an iteration in numbers.
"""
