"""Runs as Prefect flows; begin with ``launch``, which executes a run with or without Prefect.

``train`` is the flow of a run, ``sweep`` of a sweep, and ``schedule`` of scheduled runs (``timetable`` says when).
``local_server`` is the Prefect server that a run starts for itself; ``progress_page`` shows a run on Prefect's page.
"""
