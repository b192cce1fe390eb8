"""Runs as Prefect flows.

Begin with ``launch``, which executes a run with or without Prefect. ``train`` is the flow of a run, ``study`` of a
study, and ``schedule`` of scheduled runs, which start by a ``timetable``. ``local_server`` is the Prefect server that a
run starts for itself; ``progress_page`` shows a run on Prefect's page.
"""
