"""``magrpo report``: open the report of a run, or write it again."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from magrpo.progress.activity import open_console, show_activity
from magrpo.reports.publish import find_report, rebuild_report
from magrpo.training.closing import print_path
from pipelines.arguments import Json, Root, RunId
from pipelines.commands.show import locate_run, print_as_json


def open_report(
    run: RunId,
    /,
    *,
    rebuild: bool = False,
    no_browser: Annotated[bool, Parameter(negative=())] = False,
    as_json: Json = False,
    root: Root = Path("runs"),
) -> int:
    """Print where the report of a run is and open it in the browser, if there is a display; the exit code is 0.

    Args:
        run: Id of a run, or its folder. For an unfinished run, the report shows the evaluations so far.
        rebuild: Write the page again from the evaluations, for example with a newer version of magrpo.
        no_browser: Only print the path.
    """
    store = locate_run(run, root)
    console = open_console()
    with show_activity("writing the report", console):
        path = rebuild_report(store) if rebuild else find_report(store)
    if as_json:
        print_as_json({"run": store.run_id, "report": str(path)})
        return 0
    print_path(console, "report:", path)
    if not no_browser and console.is_terminal and has_display():
        webbrowser.open(path.as_uri())
    return 0


def has_display() -> bool:
    """Whether a browser can open a window here."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
