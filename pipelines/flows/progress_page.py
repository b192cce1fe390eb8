"""Prefect's page of a run: how far it is, and its closing table, as artifacts of the flow run.

A thread of its own tells the Prefect server, every ``PERIOD_S``: a server that is slow or away costs the run nothing,
and a run that ends waits ``PATIENCE_S`` for it at most.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException

from pipelines.progress.state import Attempt

log = logging.getLogger(__name__)

PERIOD_S = 3.0
PATIENCE_S = 10.0


class Artifacts:
    """Implements :class:`pipelines.progress.state.Observer` for a flow run.

    ``name`` is what the artifacts' keys begin with: artifacts of one key are versions of each other on Prefect's page,
    so it is the run's id, or the deployment's name.
    """

    def __init__(self, name: str, flow_run_id: UUID) -> None:
        self._key, self._flow_run_id = key_of(name), flow_run_id
        self._over = threading.Event()
        self._shown: tuple[float, str] | None = None
        self._progress: UUID | None = None
        self._ending = self._verdict = ""

    def begun(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # Its own client: that of the flow run is closed with it.
        client = get_client(sync_client=True, httpx_settings={"timeout": 5.0})
        self._thread = threading.Thread(target=self._work, args=(client,), name="magrpo-artifacts", daemon=True)
        self._thread.start()

    def passed(self) -> None:
        """Nothing to do: the thread looks by itself."""

    def promoted(self, text: str) -> None:
        self._verdict = text

    def ended(self, error: BaseException | None) -> None:
        self._ending = "finished" if error is None else f"ended by {type(error).__name__}"
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("Prefect's page of the run is not complete: its server took longer than %.0f s", PATIENCE_S)

    def _work(self, client: SyncPrefectClient) -> None:
        told = over = False
        pause = 0.0
        with client:
            while not over:
                over = self._over.wait(pause)
                pause = PERIOD_S
                try:
                    self._show(client)
                    if over and self._ending == "finished":
                        self._create(client, "markdown", self._key, "Closing table", self._closing())
                except (HTTPError, PrefectException) as error:
                    if not told:
                        log.warning("Prefect's page of the run is not up to date: %s", type(error).__name__)
                    told = True

    def _show(self, client: SyncPrefectClient) -> None:
        """Bring the artifact of the progress up to date, if there is news."""
        standing = self._attempt.standing
        percent = 100.0 * standing.done / max(standing.num_iterations, 1)
        if self._ending == "finished":
            percent = 100.0
        text = "\n\n".join(filter(None, (self._ending or standing.where, standing.returns, self._mlflow())))
        if self._progress is None:
            self._progress = self._create(client, "progress", f"{self._key}-progress", text, percent)
        elif (percent, text) != self._shown:
            client.update_artifact(self._progress, ArtifactUpdate(description=text, data=percent))
        self._shown = percent, text

    def _create(self, client: SyncPrefectClient, kind: str, key: str, description: str, data: str | float) -> UUID:
        artifact = ArtifactCreate(type=kind, key=key, description=description, data=data, flow_run_id=self._flow_run_id)
        return client.create_artifact(artifact).id

    def _mlflow(self) -> str:
        command, page = self._attempt.look()
        return f"MLflow: [{page}]({page})" + (f", served by `{command}`" if command else "") if page else ""

    def _closing(self) -> str:
        """The tables of the report, as the run committed them in Markdown."""
        store, standing = self._attempt.store, self._attempt.standing
        report = store.path / "stages" / f"{standing.num_iterations:05d}" / "report"
        tables = [path.read_text(encoding="utf-8") for path in sorted(report.glob("*.md"))]
        summary = f"Run {store.run_id}. {standing.returns.capitalize()}. {self._verdict}".rstrip()
        return "\n\n".join(filter(None, [summary, self._mlflow(), *tables]))


def key_of(name: str) -> str:
    """``name`` as a key of Prefect: lower-case letters, digits, dashes; a digest tells apart what comes out alike."""
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"magrpo-{key}" if key == name else f"magrpo-{key}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
