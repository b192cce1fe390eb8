"""Notices of a run's failure, recovery or promotion: to a webhook, to services of apprise, to a Prefect block.

A notice that cannot be sent is one line of warning. A thread sends it, and is waited for ``PATIENCE_S`` seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from magrpo.config import NotifyConfig, check_webhook
from magrpo.store import RunStore, atomic_write
from pipelines.environment import prefect_target
from pipelines.progress.state import Attempt, RunState

log = logging.getLogger(__name__)

Event = Literal["failure", "recovery", "promotion"]
PATIENCE_S = 10.0
"""A notice that takes longer is given up."""
_TIMEOUT_S = 5.0
_KILLED = "its process was killed, or lost its machine"
_HEADLINES = {"failure": "failed", "recovery": "continues after a failure", "promotion": "made a champion"}


class Unsent(Exception):
    """A notice could not be sent. The message holds no secret."""


class Notices:
    """Implements :class:`pipelines.progress.state.Observer`; ``page`` is the address of the flow run.

    The file ``attempt.json`` in the run directory says that a process works on the run, or why the last one failed; it
    is removed at a good end. A file that says neither was left by a killed process.
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
            self._failure = json.loads(self._file.read_bytes())["failed"]
            if self._failure is None:
                self._failure = _KILLED
                self._send("failure", RunState.read(attempt.store), _KILLED)
        self._write_file(None)

    def step_finished(self) -> None:
        if self._failure is not None and self._attempt.state.num_computed:
            self._report_recovery()

    def attempt_ended(self, error: BaseException | None) -> None:
        if not self._wanted:
            return
        if error is None and self._failure is not None:
            self._report_recovery()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            reason = describe_error(error)
            self._write_file(reason)
            self._send("failure", RunState.read(self._attempt.store), reason)
        elif self._failure is not None:
            self._write_file(self._failure)
        else:
            self._file.unlink()

    def team_promoted(self, text: str) -> None:
        self._send("promotion", self._attempt.state, text)

    @property
    def _wanted(self) -> bool:
        return bool(_channels(self._attempt.notify, {}))

    def _report_recovery(self) -> None:
        reason, self._failure = f"earlier: {self._failure}", None
        self._send("recovery", self._attempt.state, reason)

    def _write_file(self, failed: str | None) -> None:
        atomic_write(self._file, json.dumps({"failed": failed}).encode())

    def _send(self, event: Event, state: RunState, reason: str) -> None:
        attempt = self._attempt
        if event in attempt.notify.on:
            fields = _fields(event, attempt.store, state, reason)
            command, address = attempt.mlflow_page()
            fields |= {"mlflow": f"{command}, then {address}" if command else address, "prefect": self._page or ""}
            send_notice(attempt.notify, fields)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300] if first else type(error).__name__


def find_webhook(config: NotifyConfig) -> str | None:
    """The URL from the configuration, else from the environment."""
    if config.webhook is not None:
        return config.webhook.get_secret_value()
    return os.environ.get("MAGRPO_NOTIFY_WEBHOOK") or None


def _fields(event: Event, store: RunStore, state: RunState, reason: str) -> dict[str, str]:
    """What a notice says, by name."""
    fields = {
        "event": event,
        "run_id": store.run_id,
        "host": socket.gethostname(),
        "stage": state.describe_step(),
        "reason": reason,
        "returns": state.describe_returns() or "none measured yet",
    }
    if event == "failure":
        fields["resume"] = f"magrpo train --resume {store.run_id} --root {store.path.parent}"
    return fields


def format_notice(fields: Mapping[str, str]) -> tuple[str, str]:
    """The subject and the body of a notice for people."""
    subject = f"magrpo: run {fields['run_id']} {_HEADLINES[fields['event']]}"
    shown = {key: value for key, value in fields.items() if key not in ("event", "run_id") and value}
    width = max(map(len, shown))
    return subject, "\n".join(f"{key + ':':<{width + 1}} {value}" for key, value in shown.items())


def send_notice(config: NotifyConfig, fields: Mapping[str, str]) -> None:
    """Send a notice through every channel of the configuration, within ``PATIENCE_S``; log a warning for a failure."""
    channels, event = _channels(config, fields), fields["event"]
    threads = [threading.Thread(target=_try_send, args=(*item, event), daemon=True) for item in channels.items()]
    for thread in threads:
        thread.start()
    for thread, name in zip(threads, channels, strict=True):
        thread.join(PATIENCE_S)
        if thread.is_alive():
            log.warning("the notice of a %s was not sent by %s: no end after %g s", event, name, PATIENCE_S)


def _channels(config: NotifyConfig, fields: Mapping[str, str]) -> dict[str, Callable[[], None]]:
    """What sends a notice with ``fields``, by the name used in warnings."""
    webhook, block = find_webhook(config), config.block
    channels: dict[str, Callable[[], None]] = {}
    if webhook is not None:
        channels["the webhook"] = lambda: _post_webhook(webhook, fields)
    if config.urls:
        channels["notify.urls"] = lambda: _notify_services(config, fields)
    if block is not None:
        channels[f"block {block}"] = lambda: _notify_block(block, fields)
    return channels


def _try_send(name: str, send: Callable[[], None], event: str) -> None:
    try:
        send()
    except Unsent as error:
        log.warning("the notice of a %s was not sent by %s: %s", event, name, error)


def _post_webhook(url: str, fields: Mapping[str, str]) -> None:
    """POST the fields as JSON, with ``subject`` and ``text`` for people (Slack and Mattermost show ``text``).

    Raises:
        Unsent: rejected, or no answer. httpx's messages may hold the URL, so only the status code is repeated.
    """
    import httpx  # takes a tenth of a second

    try:
        check_webhook(url)
    except ValueError as error:
        raise Unsent(f"MAGRPO_NOTIFY_WEBHOOK {error}") from None
    subject, body = format_notice(fields)
    host = urlsplit(url).hostname
    try:
        answer = httpx.post(url, json={"subject": subject, **fields, "text": f"{subject}\n{body}"}, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise Unsent(f"{host} answers {error.response.status_code}") from None
    except httpx.RequestError as error:
        raise Unsent(f"{host} does not answer ({type(error).__name__})") from None


def _notify_services(config: NotifyConfig, fields: Mapping[str, str]) -> None:
    """Send through the services of ``notify.urls``.

    Raises:
        Unsent: a service did not accept the notice. apprise logs the reason, which may hold secrets, at level INFO.
    """
    from apprise import Apprise  # loads a hundred services

    subject, body = format_notice(fields)
    services = Apprise([url.get_secret_value() for url in config.urls])
    if not services.notify(body=body, title=subject):
        raise Unsent("a service did not accept it")


def _notify_block(name: str, fields: Mapping[str, str]) -> None:
    """Send through a notification block on the Prefect server.

    Raises:
        Unsent: no server, no such block, or its service did not accept the notice, in words that may hold its address.
    """
    if prefect_target() is None:
        raise Unsent("it lies on a Prefect server, and none is named (PREFECT_API_URL)")
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
        raise Unsent("it is no notification block")

    async def notify(block: NotificationBlock) -> None:
        subject, body = format_notice(fields)
        with block.raise_on_failure():
            await block.notify(body, subject)

    try:
        asyncio.run(notify(block))
    except (NotificationError, HTTPError, OSError) as error:
        raise Unsent(f"its service did not accept it ({type(error).__name__})") from None
