"""Connecting to MLflow tracking stores: their URIs and pages, and the translation of their errors."""

import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from magrpo.config.services import TrackingConfig, hide_password, hide_passwords
from magrpo.errors import ConfigError, first_line, list_choices, quote_value
from magrpo.files.locks import lock_folder

_DATABASE_ERROR = re.compile(r"^\(\S*Error\) .*", re.MULTILINE)
_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql", "databricks")  # databricks: also alone, without ://
TRAINING_MODE = "workflowType=machine_learning"
"""The query that switches MLflow's pages to the mode for training."""


class Unavailable(Exception):
    """MLflow cannot be used at the moment."""


class RecordRefused(Exception):
    """MLflow rejects a record because of its content; sending it again is pointless."""


def mlflow_page(uri: str, experiment_id: str, mlflow_run_id: str) -> tuple[str, str]:
    """The command that serves the page of an MLflow run (empty for a server), and the address of the page."""
    # Without the mode, a browser that opens the page for the first time shows the pages for GenAI.
    page = f"/#/experiments/{experiment_id}/runs/{mlflow_run_id}?{TRAINING_MODE}" if mlflow_run_id else ""
    if uri.startswith(("http://", "https://")):
        return "", hide_password(uri).rstrip("/") + page
    return (
        f"DO_NOT_TRACK=true mlflow ui --backend-store-uri {shlex.quote(hide_password(uri))}",
        "http://127.0.0.1:5000" + page,
    )


def tracking_uri(config: TrackingConfig, root: Path) -> str:
    """The URI of the configuration, else MLFLOW_TRACKING_URI, else a SQLite file in the root of runs.

    Raises ConfigError, naming the source of the URI, if MLflow cannot use it.
    """
    if config.uri:
        return check_uri(config.uri, "tracking.uri")
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return check_uri(uri, "the environment's MLFLOW_TRACKING_URI")
    if {"?", "#"} & set(str(root.absolute())):
        raise ConfigError(f"root {root}: a folder with '?' or '#' in its path cannot hold MLflow's database")
    return f"sqlite:///{root.absolute() / 'mlflow.db'}"


def check_tracking(config: TrackingConfig, root: Path) -> str:
    """The tracking URI of a run. Raises ConfigError if MLflow cannot use the URI or the name of the experiment."""
    uri = tracking_uri(config, root)
    if uri.partition("://")[0] == "databricks" and not config.experiment.startswith("/"):
        raise ConfigError(
            f"tracking.experiment = {quote_value(config.experiment)}: on Databricks an experiment is an absolute path, "
            "such as /Users/you@example.org/magrpo"
        )
    return uri


def check_uri(uri: str, source: str) -> str:
    """Return ``uri`` if MLflow can use it; else raise ConfigError, whose message begins with ``source``."""
    scheme, colon, rest = uri.partition("://")
    known = (*_SERVERS, *_DATABASES, *(entry.name for entry in entry_points(group="mlflow.tracking_store")))
    problem = ""
    if not colon and uri not in known:
        problem = f"is no URI; of a file it is sqlite:///{Path(uri).absolute()}/mlflow.db, of a server http://HOST:PORT"
    elif colon and scheme.partition("+")[0] not in known:
        problem = f"has a scheme that MLflow does not know; {list_choices(scheme, known)}"
    elif scheme.partition("+")[0] == "sqlite" and (
        rest[:1] != "/" or {"?", "#"} & set(rest) or Path(rest[1:]).is_dir()
    ):
        problem = "names no file; write sqlite:////FOLDER/mlflow.db, without '?' and '#'"
    elif scheme in _SERVERS:
        try:
            problem = "" if urlsplit(uri).hostname and urlsplit(uri).port != 0 else "names no host"
        except ValueError as error:
            problem = f"is no URL ({error})"
    if problem:
        raise ConfigError(f"{source} {quote_value(hide_password(uri))} {problem}")
    return uri


def check_reachable(uri: str) -> None:
    """Send a small request to the tracking store. Raises Unavailable if the answer is an error, or missing."""
    quieten_mlflow()
    from mlflow import MlflowClient  # takes seconds

    with translate_errors(uri):
        MlflowClient(uri).search_experiments(max_results=1)


def make_database(uri: str) -> None:
    """Create the SQLite file of a URI if it is missing; other URIs need nothing.

    MLflow cannot use a file whose creation was interrupted, so the file is created under another name and renamed. A
    lock on the folder lets only one process do this at a time.
    """
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists():
        return
    from mlflow import MlflowClient  # takes seconds

    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(path.parent):
        if path.exists():
            return
        for stale in path.parent.glob(f".{path.name}.draft*"):  # of a killed process, with its journal
            stale.unlink()
        draft = path.with_name(f".{path.name}.draft-{uuid4().hex}")  # a new name each time: MLflow keeps URIs open
        MlflowClient(f"sqlite:///{draft}").search_experiments(max_results=1)
        draft.rename(path)


def quieten_mlflow() -> None:
    """Set the variables that MLflow reads on import: no telemetry, no start-up messages, short timeouts, one retry."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)  # the outbox already warns
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs the tracebacks of its own errors


@contextmanager
def translate_errors(uri: str, *, may_refuse: bool = False) -> Iterator[None]:
    """Translate errors of MLflow to Unavailable, or, with ``may_refuse``, RecordRefused if the content is at fault."""
    from mlflow.exceptions import MlflowException  # takes seconds
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        raise Unavailable(f"MLflow at {hide_password(uri)} cannot be used ({error}; install it)") from error
    except (MlflowException, SQLAlchemyError, OSError) as error:
        found = _DATABASE_ERROR.search(str(error))  # the first line may be about another error
        reason = hide_passwords(found[0] if found else first_line(error))[:300]
        code = error.error_code if isinstance(error, MlflowException) else ""
        if may_refuse and code in {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}:
            raise RecordRefused(reason) from error
        raise Unavailable(f"MLflow at {hide_password(uri)} cannot be used ({reason})") from error


@contextmanager
def translate_store_errors() -> Iterator[None]:
    """Translate errors that belong to neither MLflow nor Python to Unavailable: stores of artifacts have their own."""
    from mlflow.exceptions import MlflowException  # takes seconds

    try:
        yield
    except (MlflowException, OSError, ImportError):
        raise
    except Exception as error:  # of the store's own package, which this project does not know
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise Unavailable(f"the store of artifacts failed ({reason})") from error
