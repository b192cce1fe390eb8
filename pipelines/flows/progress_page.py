"""Prefect's page of a run: a log line for each stage, and the progress as an artifact of the flow run.

A thread updates the Prefect server every ``PERIOD_S`` seconds, so a slow or absent server costs the run nothing. At its
end a run waits for the thread at most ``PATIENCE_S`` seconds.
"""

import logging
import re
import threading
from contextlib import suppress
from datetime import UTC, datetime
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate, LogCreate
from prefect.exceptions import PrefectException

from magrpo.errors import ConfigError
from magrpo.progress.state import Attempt, Observer, describe_error, was_refused
from magrpo.run.files import read_place
from magrpo.run.steps import Step

log = logging.getLogger(__name__)

PERIOD_S = 3.0
PATIENCE_S = 10.0


class ProgressPage(Observer):
    """Observes the run of a flow run; between its start and its end a thread reads the state.

    Artifacts of one key are versions of each other on Prefect's page. ``name``: the run's id, or the deployment's name.
    """

    def __init__(self, name: str, flow_run_id: UUID) -> None:
        self._key = f"{artifact_key(name)}-progress"
        self._flow_run_id = flow_run_id
        self._over = threading.Event()
        self._shown: tuple[float, str] | None = None
        self._progress: UUID | None = None
        self._ending = ""
        self._lines: list[LogCreate] = []
        """Log lines that wait for the thread."""

    def attempt_started(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # Not the flow run's client, which is closed together with the flow run.
        client = get_client(sync_client=True, httpx_settings={"timeout": 5.0})
        self._thread = threading.Thread(target=self._update_page, args=(client,), name="magrpo-artifacts", daemon=True)
        self._thread.start()
        with suppress(ConfigError, OSError):  # the loop reads the place, too, and raises the error
            place = read_place(attempt.store)
            if not place.is_default:
                self._say(f"place: {place.describe()}")

    def step_finished(self, step: Step) -> None:
        if line := self._attempt.state.finished_lines.get(step):
            self._say(line)

    def team_promoted(self, text: str) -> None:
        self._say(text)

    def attempt_ended(self, error: BaseException | None) -> None:
        self._ending = "finished" if error is None else f"ended by {describe_error(error)}"
        returns = self._attempt.state.describe_returns()
        self._say(f"{self._ending}: {returns}" if returns else self._ending, logging.ERROR if error else logging.INFO)
        if error is not None and not was_refused(self._attempt.store, error):
            self._say(f"to resume: {self._attempt.store.format_command('resume', from_anywhere=True)}")
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("Prefect's page of the run is incomplete: its server took longer than %.0f s", PATIENCE_S)

    def _update_page(self, client: SyncPrefectClient) -> None:
        warned = over = False
        pause = 0.0
        with client:
            while not over:
                over = self._over.wait(pause)
                pause = PERIOD_S
                try:
                    # A copy: other threads append meanwhile, and lines stay in the list until they are delivered.
                    lines = self._lines[:]
                    if lines:
                        client.create_logs(lines)
                        del self._lines[: len(lines)]
                    self._update_progress(client)
                except (HTTPError, PrefectException) as error:
                    if not warned:
                        log.warning("Prefect's page of the run is not up to date: %s", type(error).__name__)
                    warned = True

    def _say(self, text: str, level: int = logging.INFO) -> None:
        """Log a line on the flow run's page."""
        now = datetime.now(UTC)
        flow_run_id = self._flow_run_id
        self._lines.append(LogCreate(name="magrpo", level=level, message=text, timestamp=now, flow_run_id=flow_run_id))

    def _update_progress(self, client: SyncPrefectClient) -> None:
        """Create the progress artifact, or update it if the state has changed."""
        state = self._attempt.state
        done = (state.trained_iterations + state.finished_rows) / max(state.num_iterations + state.num_rows, 1)
        percent = 100.0 if self._ending == "finished" else 100.0 * done
        lines = (self._ending or state.describe_step(), state.describe_returns(), self._mlflow_link())
        text = "\n\n".join(filter(None, lines))
        if self._progress is None:
            artifact = ArtifactCreate(
                type="progress", key=self._key, description=text, data=percent, flow_run_id=self._flow_run_id
            )
            self._progress = client.create_artifact(artifact).id
        elif (percent, text) != self._shown:
            client.update_artifact(self._progress, ArtifactUpdate(description=text, data=percent))
        self._shown = percent, text

    def _mlflow_link(self) -> str:
        command, page = self._attempt.mlflow_page()
        if not page:
            return ""
        condition = f", after starting `{command}`" if command else ""
        return f"MLflow: [{page}]({page}){condition}"


def artifact_key(name: str) -> str:
    """Turn ``name`` into a Prefect key, which allows lower-case letters, digits and dashes."""
    return "magrpo-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
