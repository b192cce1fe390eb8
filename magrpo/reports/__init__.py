"""Figures, charts and pages about finished runs.

``run`` is the report of a run: begin with ``RunReport.list_sections``, the page from top to bottom. ``comparison`` and
``comparison_tables`` compare runs, ``study`` compares the arms of a study, and ``baselines`` compares agents with
baselines. All of them build blocks of ``page``, which renders them with the templates in this folder. ``verdict`` and
``health`` judge a run, ``training_metrics`` shows its metrics, ``figures`` formats numbers, and ``charts`` draws.
"""
