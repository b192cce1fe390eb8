"""Removes a run whose configuration was refused, so that its name stays free."""

import shutil
from contextlib import suppress

from magrpo.run.lock import hold_run
from magrpo.run.store import RunStore
from magrpo.tracking.connection import Unavailable, tracking_uri
from magrpo.tracking.mlflow_runs import delete_empty_run
from magrpo.tracking.outbox import find_folder_id


def remove_run(store: RunStore) -> None:
    """Remove a run that has sampled nothing, also from its tracking store if that answers.

    If its folder is a link to another disk, the link and the empty folder stay.
    """
    tracking = store.config().tracking
    uri = tracking_uri(tracking, store.path.parent)
    folder_id = find_folder_id(store.path)
    with hold_run(store):
        for path in store.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not store.path.is_symlink():
            store.path.rmdir()
    with suppress(Unavailable):
        delete_empty_run(uri, tracking.experiment, folder_id)
