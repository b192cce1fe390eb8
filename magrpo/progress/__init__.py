"""The progress of a run as people see it: on the console, on Prefect's page, and in notices.

Begin with :mod:`magrpo.progress.state`: the live state of a run, and the protocol of its observers.
:mod:`~magrpo.progress.console` shows that state on a terminal or in a log, and :mod:`~magrpo.progress.notify` sends
notices. :mod:`~magrpo.progress.activity` shows the work of a command outside the stages of a run.
"""
