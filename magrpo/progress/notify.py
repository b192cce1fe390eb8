"""Notices of a run's failure, recovery or promotion: to a webhook, to services of apprise, to a Prefect block.

A notice that cannot be sent is one line of warning. A thread sends it, and is waited for ``PATIENCE_S`` seconds.
"""

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

from magrpo.config.services import NotifyConfig, check_webhook
from magrpo.files.writing import atomic_write
from magrpo.process.environment import prefect_target
from magrpo.progress.state import Attempt, RunState, describe_error
from magrpo.reports.verdict import read_verdict
from magrpo.run.files import read_place
from magrpo.run.steps import Step

log = logging.getLogger(__name__)

Event = Literal["failure", "recovery", "promotion"]
Send = Callable[[Mapping[str, str]], None]
PATIENCE_S = 10.0
"""A notice that takes longer is given up."""
_TIMEOUT_S = 5.0
_KILLED = "its process was killed, or its machine went down"
_NOT_SENT = "the notice of a %s could not be sent through %s: %s"
_HEADLINES = {"failure": "failed", "recovery": "continues after a failure", "promotion": "is now the champion"}


class Unsent(Exception):
    """A notice could not be sent. The message holds no secret."""


class Notices:
    """Implements :class:`magrpo.progress.state.Observer`; ``page`` is the address of the flow run.

    The file ``attempt.json`` in the run directory says that a process works on the run, or why the last one failed; it
    is removed at a good end. A file without a failure was left by a killed process.
    """

    def __init__(self, page: str | None = None) -> None:
        self._page = page
        self._failure: str | None = None
        """Why the previous attempt failed; None if it did not, or once a step was computed since."""

    def attempt_started(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._file = attempt.store.path / "attempt.json"
        if not self._wanted:
            return
        if self._file.exists():
            with suppress(ValueError, LookupError, TypeError):  # damaged: as if it had been killed
                self._failure = json.loads(self._file.read_bytes())["failed"]
            if self._failure is None:
                self._failure = _KILLED
                self._send("failure", RunState.read(attempt.store), _KILLED)
        self._write_file(None)

    def step_finished(self, step: Step) -> None:
        if self._failure is not None and self._attempt.state.num_computed:
            self._report_recovery()

    def attempt_ended(self, error: BaseException | None) -> None:
        if not self._wanted:
            return
        if error is not None and type(error) is not KeyboardInterrupt:  # nobody watched what a signal ended
            reason = describe_error(error)
            self._write_file(reason)
            self._send("failure", RunState.read(self._attempt.store), reason)
        elif error is not None and self._failure is not None:
            self._write_file(self._failure)
        else:
            if self._failure is not None:
                self._report_recovery()
            self._file.unlink()

    def team_promoted(self, text: str) -> None:
        self._send("promotion", self._attempt.state, text)

    @property
    def _wanted(self) -> bool:
        return bool(_list_channels(self._attempt.notify))

    def _report_recovery(self) -> None:
        reason, self._failure = f"earlier: {self._failure}", None
        self._send("recovery", self._attempt.state, reason)

    def _write_file(self, failed: str | None) -> None:
        atomic_write(self._file, json.dumps({"failed": failed}).encode())

    def _send(self, event: Event, state: RunState, reason: str) -> None:
        store, notify = self._attempt.store, self._attempt.notify
        if event not in notify.on:
            return
        command, address = self._attempt.mlflow_page()
        verdict = read_verdict(store)
        fields = {
            "event": event,
            "run_id": store.run_id,
            "host": socket.gethostname(),
            "place": read_place(store).describe(),
            "stage": state.describe_step(),
            "reason": reason,
            "returns": state.describe_returns() or "none measured yet",
            **({"verdict": verdict.sentence} if verdict is not None else {}),
            **({"resume": self._attempt.resume_command} if event == "failure" else {}),
            "mlflow": f"{command}, then {address}" if command else address,
            "prefect": self._page or "",
        }
        send_notice(notify, fields)


def send_notice(config: NotifyConfig, fields: Mapping[str, str]) -> None:
    """Send a notice through every channel of the configuration, within ``PATIENCE_S``; log a warning for a failure."""

    def try_send(name: str, send: Send) -> None:
        try:
            send(fields)
        except Unsent as error:
            log.warning(_NOT_SENT, fields["event"], name, error)

    channels = _list_channels(config).items()
    threads = {name: threading.Thread(target=try_send, args=(name, send), daemon=True) for name, send in channels}
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(PATIENCE_S)
        if thread.is_alive():
            log.warning(_NOT_SENT, fields["event"], name, f"not finished after {PATIENCE_S:g} s")


def _list_channels(config: NotifyConfig) -> dict[str, Send]:
    """The functions that send a notice, by the name used in warnings."""
    webhook = config.webhook.get_secret_value() if config.webhook else os.environ.get("MAGRPO_NOTIFY_WEBHOOK")
    channels: dict[str, Send] = {}
    if webhook:
        channels["the webhook"] = partial(_post_webhook, webhook)
    if config.urls:
        channels["notify.urls"] = partial(_notify_services, config)
    if config.block is not None:
        channels[f"block {config.block}"] = partial(_notify_block, config.block)
    return channels


def _format_notice(fields: Mapping[str, str]) -> tuple[str, str]:
    """The subject and the body of a notice for people."""
    subject = f"magrpo: run {fields['run_id']} {_HEADLINES[fields['event']]}"
    shown = {key: value for key, value in fields.items() if key not in ("event", "run_id") and value}
    width = max(map(len, shown))
    return subject, "\n".join(f"{key + ':':<{width + 1}} {value}" for key, value in shown.items())


def _post_webhook(url: str, fields: Mapping[str, str]) -> None:
    """POST the fields as JSON, with ``subject`` and ``text`` for people; Slack and Mattermost show ``text``."""
    import httpx  # takes a tenth of a second

    try:
        check_webhook(url)
    except ValueError as error:
        raise Unsent(f"MAGRPO_NOTIFY_WEBHOOK {error}") from None
    subject, body = _format_notice(fields)
    host = urlsplit(url).hostname
    try:
        answer = httpx.post(url, json={"subject": subject, **fields, "text": f"{subject}\n{body}"}, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:  # httpx's own messages may hold the URL
        raise Unsent(f"{host} answers {error.response.status_code}") from None
    except httpx.RequestError as error:
        raise Unsent(f"{host} does not answer ({type(error).__name__})") from None


def _notify_services(config: NotifyConfig, fields: Mapping[str, str]) -> None:
    """Send through the services of ``notify.urls``. apprise logs why one refuses, maybe with secrets, at level INFO."""
    from apprise import Apprise  # loads a hundred services

    subject, body = _format_notice(fields)
    if not Apprise([url.get_secret_value() for url in config.urls]).notify(body=body, title=subject):
        raise Unsent("a service did not accept it")


def _notify_block(name: str, fields: Mapping[str, str]) -> None:
    """Send through a notification block on the Prefect server. Words of its service may hold its address."""
    if prefect_target() is None:
        raise Unsent("the notification block is stored on a Prefect server; set PREFECT_API_URL")
    import prefect.blocks.notifications  # noqa: F401  prefect; registers the types of blocks
    from httpx import HTTPError  # takes a tenth of a second
    from prefect.blocks.abstract import NotificationBlock, NotificationError  # prefect
    from prefect.blocks.core import Block  # prefect

    try:
        block = Block.load(name)
    except ValueError:
        raise Unsent("the Prefect server has no such block") from None
    except HTTPError as error:
        raise Unsent(f"the Prefect server does not answer ({type(error).__name__})") from None
    if not isinstance(block, NotificationBlock):
        raise Unsent("it is not a notification block")

    async def notify(block: NotificationBlock) -> None:
        subject, body = _format_notice(fields)
        with block.raise_on_failure():
            await block.notify(body, subject)

    try:
        asyncio.run(notify(block))
    except (NotificationError, HTTPError, OSError) as error:
        raise Unsent(f"its service did not accept it ({type(error).__name__})") from None
