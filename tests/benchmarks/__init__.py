"""Comparison with CoMLRL: ``make bench``. Timings are printed, never asserted; see docs/performance.md."""
