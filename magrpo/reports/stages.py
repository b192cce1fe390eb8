"""The last stage of a run: ``report`` of a training run, ``tables`` of a run that compares baselines."""

from magrpo.reports.baselines import BaselineTable, read_baselines
from magrpo.reports.run import RunReport
from magrpo.run.files import read_evaluation
from magrpo.stages.context import Metrics, StageContext
from magrpo.types import HEADLINE


def write_report(context: StageContext) -> Metrics:
    """Write the closing tables and pictures."""
    store, config = context.store, context.config
    reports = [read_evaluation(store.folder(pointer)) for pointer in context.inputs]
    RunReport(store, config, reports).write_files(context.folder)
    before, after = (report.summary[HEADLINE]["return"].mean for report in (reports[0], reports[-1]))
    return {"report/return_gain": after - before}


def write_tables(context: StageContext) -> Metrics:
    """Write the tables of a run of baselines."""
    BaselineTable(context.config, read_baselines(context.store, context.config)).write_files(context.folder)
    return {}
