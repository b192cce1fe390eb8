"""MLflow tracking servers: which one, whether it answers, how to look at it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from magrpo.config import TrackingConfig
from magrpo.tracking.spool import Refused, Unavailable


def how_to_look(uri: str, experiment_id: str, mlflow_run_id: str) -> tuple[str, str]:
    """The command that shows a run of MLflow (empty for a server) and the address of its page."""
    page = f"/#/experiments/{experiment_id}/runs/{mlflow_run_id}" if mlflow_run_id else ""
    if uri.startswith(("http://", "https://")):
        return "", without_password(uri).rstrip("/") + page
    return f"mlflow ui --backend-store-uri {without_password(uri)}", "http://127.0.0.1:5000" + page


def tracking_uri(config: TrackingConfig, root: Path) -> str:
    """The configuration's URI, else MLFLOW_TRACKING_URI, else a SQLite file in the run root."""
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI") or _default_uri(root)


def reachable(uri: str) -> None:
    """Ask the tracking store something small.

    Raises:
        Unavailable: it does not answer, or not as it should.
    """
    quieten_mlflow()
    from mlflow import MlflowClient

    with usable(uri):
        MlflowClient(uri).search_experiments(max_results=1)


def make_database(uri: str) -> None:
    """Make the SQLite file of a URI if it is missing; nothing for other URIs.

    MLflow cannot use a file whose making was cut short by a kill. So it is made under another name and put in place by
    a rename; the kernel's lock on the folder sees to it that one process does that.
    """
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not path.exists():
            draft = path.with_name(f".{path.name}.draft")
            for stale in path.parent.glob(f"{draft.name}*"):  # its journal, too
                stale.unlink()
            MlflowClient(f"sqlite:///{draft}").search_experiments(max_results=1)
            draft.rename(path)
    finally:
        os.close(folder)


def without_password(uri: str) -> str:
    """The URI fit to be printed."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def quieten_mlflow() -> None:
    """Set what MLflow reads when it is imported: no telemetry, no start-up messages, a short temper with servers."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _default_uri(root: Path) -> str:
    return f"sqlite:///{root.absolute() / 'mlflow.db'}"


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn what MLflow raises into :class:`Unavailable` or :class:`Refused`."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = str(error).partition("\n")[0].replace(uri.rstrip("/"), without_password(uri))[:300]
        if isinstance(error, MlflowException) and error.error_code in {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}:
            raise Refused(reason) from error
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({reason})") from error


@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Turn whatever MLflow raises into :class:`Unavailable`: for requests of which none should be refused."""
    try:
        with translated(uri):
            yield
    except Refused as error:
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({error})") from error
