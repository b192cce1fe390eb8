"""MLflow tracking servers: which one, whether it answers, how to look at it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from magrpo.config import TrackingConfig
from magrpo.spool import Refused, Unavailable


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

    try:
        with translated(uri):
            MlflowClient(uri).search_experiments(max_results=1)
    except Refused as error:
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({error})") from error


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
