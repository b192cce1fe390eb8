"""Notices of a run's failure, recovery or promotion, sent through apprise to services such as Slack, mail or a webhook.

A notice never fails a run: if it cannot be sent within ``PATIENCE_S`` seconds, a warning is logged.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from magrpo.config.services import NotifyConfig, make_apprise
from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.progress.state import Attempt, RunState, describe_error, was_refused
from magrpo.reports.verdict import read_verdict
from magrpo.run.files import read_place
from magrpo.run.steps import Step

log = logging.getLogger(__name__)

Event = Literal["failure", "recovery", "promotion"]
PATIENCE_S = 10.0
"""Seconds to wait for a service before giving up on a notice."""
_KILLED = "its process was killed, or its machine went down"
_NOT_SENT = "the notice of a %s could not be sent through %s: %s"
_HEADLINES = {"failure": "failed", "recovery": "continues after a failure", "promotion": "is now the champion"}


class Notices:
    """Implements :class:`magrpo.progress.state.Observer`; ``page`` is the address of the flow run.

    The file ``attempt.json`` in the run directory records that a process works on the run, or why the last one failed.
    A successful end removes it, so a file without a failure was left behind by a killed process.
    """

    def __init__(self, page: str | None = None) -> None:
        self._page = page
        self._failure: str | None = None
        """Why the previous attempt failed; None if it did not, or once this attempt has computed a step."""

    def attempt_started(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._file = attempt.store.path / "attempt.json"
        if not self._wanted:
            return
        if self._file.exists():
            with suppress(ValueError, LookupError, TypeError):  # a damaged file counts as left by a killed process
                self._failure = json.loads(self._file.read_bytes())["failed"]
            if self._failure is None:
                self._failure = _KILLED
                self._report_failure(_KILLED)
        self._write_file(None)

    def step_finished(self, step: Step) -> None:
        if self._failure is not None and self._attempt.state.num_computed:
            self._report_recovery()

    def attempt_ended(self, error: BaseException | None) -> None:
        if not self._wanted:
            return
        if error is not None and type(error) is not KeyboardInterrupt:  # after Ctrl-C a person is watching
            reason = describe_error(error)
            self._write_file(reason)
            self._report_failure(reason, can_resume=not was_refused(self._attempt.store, error))
        elif error is not None and self._failure is not None:
            self._write_file(self._failure)
        else:
            if self._failure is not None:
                self._report_recovery()
            self._remove_file()

    def team_promoted(self, text: str) -> None:
        self._send("promotion", self._attempt.state, text)

    @property
    def _wanted(self) -> bool:
        return bool(_list_urls(self._attempt.notify))

    def _report_failure(self, reason: str, *, can_resume: bool = True) -> None:
        resume = self._attempt.store.format_command("resume", from_anywhere=True) if can_resume else ""
        self._send("failure", self._read_state(), reason, resume)

    def _read_state(self) -> RunState:
        """Read where the run stands; from a directory that cannot be read, take what this attempt knows."""
        try:
            return RunState.read(self._attempt.store)
        except (ConfigError, OSError):
            return self._attempt.state

    def _report_recovery(self) -> None:
        reason, self._failure = f"earlier: {self._failure}", None
        self._send("recovery", self._attempt.state, reason)

    def _write_file(self, failed: str | None) -> None:
        """Record the state of the attempt for the next one. A full disk must not keep the notice from being sent."""
        try:
            atomic_write(self._file, json.dumps({"failed": failed}).encode())
        except OSError as error:
            log.warning("the state of the attempt could not be written: %s", describe_error(error))

    def _remove_file(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be removed: %s", self._file, describe_error(error))

    def _send(self, event: Event, state: RunState, reason: str, resume: str = "") -> None:
        store, notify = self._attempt.store, self._attempt.notify
        command, address = self._attempt.mlflow_page()
        verdict, place = None, ""
        with suppress(ConfigError, OSError):  # the run directory cannot be read, which may be what the notice is about
            verdict, place = read_verdict(store), read_place(store).describe()
        fields = {
            "event": event,
            "run_id": store.run_id,
            "host": socket.gethostname(),
            "place": place,
            "stage": state.describe_step(),
            "reason": reason,
            "returns": state.describe_returns() or "none measured yet",
            "verdict": "" if verdict is None else verdict.sentence,
            "resume": resume,
            "mlflow": f"{command}, then {address}" if command else address,
            "prefect": self._page or "",
        }
        send_notice(notify, fields)


def send_notice(config: NotifyConfig, fields: Mapping[str, str]) -> None:
    """Send a notice to every service, within ``PATIENCE_S``; log a warning for each that fails, without its URL.

    Fields that are empty are left out.
    """
    from apprise import NotifyBase, NotifyType  # imports about a hundred services

    services = make_apprise()
    event = fields["event"]
    are_known = [services.add(url) for url in _list_urls(config)]
    if not all(are_known):  # their validity was checked when the configuration was read
        log.warning(_NOT_SENT, event, "MAGRPO_NOTIFY_URLS", "apprise does not know a URL in it")
    subject, body = _format_notice(fields)
    kind = NotifyType.FAILURE if event == "failure" else NotifyType.SUCCESS

    def notify_service(service: NotifyBase) -> None:
        if not service.notify(body=body, title=subject, notify_type=kind):
            log.warning(_NOT_SENT, event, service.service_name, "the service did not answer or did not accept it")

    threads = {
        threading.Thread(target=notify_service, args=(service,), daemon=True): service.service_name
        for service in services
    }
    for thread in threads:
        thread.start()
    for thread, name in threads.items():
        thread.join(PATIENCE_S)
        if thread.is_alive():
            log.warning(_NOT_SENT, event, name, f"not finished after {PATIENCE_S:g} s")


def _list_urls(config: NotifyConfig) -> list[str]:
    """Return the URLs of the services that receive notices."""
    if config.urls:
        return [url.get_secret_value() for url in config.urls]
    return os.environ.get("MAGRPO_NOTIFY_URLS", "").split()


def _format_notice(fields: Mapping[str, str]) -> tuple[str, str]:
    """Return the subject and the body of a notice."""
    subject = f"magrpo: run {fields['run_id']} {_HEADLINES[fields['event']]}"
    shown = {key: value for key, value in fields.items() if key not in ("event", "run_id") and value}
    width = max(map(len, shown)) + 1
    return subject, "\n".join(f"{key + ':':<{width}} {value}" for key, value in shown.items())
