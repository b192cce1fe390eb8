"""Benchmarks that the documents quote: the comparison with CoMLRL (``make bench``), credit and orchestration.

Timings are printed, never asserted. Begin with :mod:`tests.benchmarks.__main__` or :mod:`tests.benchmarks.measure`; see
docs/performance.md.
"""
