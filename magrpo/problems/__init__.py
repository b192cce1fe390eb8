"""Problem sets: from a generator or from rows of a file or the hub to problems in the HumanEval form.

Begin with :mod:`magrpo.problems.files`, the base class of sets that are read from files, and ``humaneval``, the
simplest of them. ``rows`` reads the rows of a data set and splits them. ``coopcode``, ``relay`` and ``notes`` are
generated, small enough for a CPU; ``livecodebench`` has hidden tests; ``writing`` holds texts for two authors.
"""
