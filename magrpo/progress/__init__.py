"""What people see of a run while it works: the console, its live state, and notices.

Begin with :mod:`magrpo.progress.state`, which the console, Prefect's page and notices all read.
"""
