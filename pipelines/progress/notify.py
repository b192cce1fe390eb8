"""Notices of what happens to a run while nobody watches: a webhook, a Prefect notification block, or both.

Both are Prefect's notification blocks; Prefect is imported when there is something to send. A notice that cannot be
sent is one line of warning. Every notice is sent from a thread that is waited for ``PATIENCE_S`` at most.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from magrpo.config import NotifyConfig, check_webhook
from magrpo.store import RunStore
from pipelines.environment import prefect_target
from pipelines.progress.state import Attempt, Standing

log = logging.getLogger(__name__)

Event = Literal["failure", "recovery", "promotion"]
PATIENCE_S = 10.0
"""A notice that takes longer is given up."""
_TIMEOUT_S = 5.0
_KILLED = "its process was killed, or lost its machine"
_HEADS = {"failure": "failed", "recovery": "goes on after a failure", "promotion": "made a champion"}


class Unsent(Exception):
    """A notice could not be sent. The message holds no secret."""


class Notices:
    """Implements :class:`pipelines.progress.state.Observer`; ``page`` is the address of the flow run.

    The file ``attempt.json`` in the run directory says that a process works on the run, or why the last one failed. It
    is removed at a good end. One that is found says that there was a failure; if it gives no reason, a killed process.
    """

    def __init__(self, page: str | None = None) -> None:
        self._page = page
        self._trouble: str | None = None
        """Why the earlier attempt failed; None when it did not, or when it is overcome."""

    def begun(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._file = attempt.store.path / "attempt.json"
        if not self._wanted:
            return
        if self._file.exists():
            self._trouble = json.loads(self._file.read_bytes())["failed"]
            if self._trouble is None:
                self._trouble = _KILLED
                self._tell("failure", Standing.of(attempt.store), _KILLED)
        self._note(None)

    def passed(self) -> None:
        if self._trouble is not None and self._attempt.standing.fresh:
            self._recovered()

    def ended(self, error: BaseException | None) -> None:
        if not self._wanted:
            return
        if error is None and self._trouble is not None:
            self._recovered()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            reason = reason_of(error)
            self._note(reason)
            self._tell("failure", Standing.of(self._attempt.store), reason)
        elif self._trouble is not None:
            self._note(self._trouble)
        else:
            self._file.unlink()

    def promoted(self, text: str) -> None:
        self._tell("promotion", self._attempt.standing, text)

    @property
    def _wanted(self) -> bool:
        config = self._attempt.notify
        return config.block is not None or webhook_of(config) is not None

    def _recovered(self) -> None:
        reason, self._trouble = f"earlier: {self._trouble}", None
        self._tell("recovery", self._attempt.standing, reason)

    def _note(self, failed: str | None) -> None:
        """Written anew in one piece: a reader finds the old text or the new one."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"failed": failed}), encoding="utf-8")
        draft.replace(self._file)

    def _tell(self, event: Event, standing: Standing, reason: str) -> None:
        config = self._attempt.notify
        if event in config.on:
            send(config, _fields(event, self._attempt.store, standing, reason, self._attempt.look(), self._page))


def reason_of(error: BaseException) -> str:
    """What an exception says, on one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300] if first else type(error).__name__


def webhook_of(config: NotifyConfig) -> str | None:
    """The URL from the configuration, else from the environment."""
    if config.webhook is not None:
        return config.webhook.get_secret_value()
    return os.environ.get("MAGRPO_NOTIFY_WEBHOOK") or None


def _fields(
    event: Event, store: RunStore, standing: Standing, reason: str, look: tuple[str, str], page: str | None
) -> dict[str, str]:
    """What a notice tells, by name, as texts."""
    command, address = look
    fields = {
        "event": event,
        "run_id": store.run_id,
        "host": socket.gethostname(),
        "stage": standing.where,
        "reason": reason,
        "returns": standing.returns or "none measured yet",
        "mlflow": f"{command}, then {address}" if command else address,
        "prefect": page or "",
    }
    if event == "failure":
        fields["resume"] = f"magrpo train --resume {store.run_id} --root {store.path.parent}"
    return fields


def text_of(fields: dict[str, str]) -> tuple[str, str]:
    """The subject and the body of a notice for people."""
    subject = f"magrpo: run {fields['run_id']} {_HEADS[fields['event']]}"
    shown = {key: value for key, value in fields.items() if key not in ("event", "run_id") and value}
    width = max(map(len, shown))
    return subject, "\n".join(f"{key + ':':<{width + 1}} {value}" for key, value in shown.items())


def send(config: NotifyConfig, fields: dict[str, str]) -> None:
    """Send a notice to everybody the configuration names, within ``PATIENCE_S``; what fails is a line of warning."""
    url, block = webhook_of(config), config.block
    ways: dict[str, Callable[[], None]] = {}
    if url is not None:
        ways["the webhook"] = lambda: _post(url, fields)
    if block is not None:
        ways[f"block {block}"] = lambda: _use_block(block, fields)
    event = fields["event"]
    threads = [threading.Thread(target=_try, args=(*way, event), daemon=True) for way in ways.items()]
    for thread in threads:
        thread.start()
    for thread, name in zip(threads, ways, strict=True):
        thread.join(PATIENCE_S)
        if thread.is_alive():
            log.warning("the notice of a %s was not sent by %s: no end after %g s", event, name, PATIENCE_S)


def _try(name: str, way: Callable[[], None], event: str) -> None:
    try:
        way()
    except Unsent as error:
        log.warning("the notice of a %s was not sent by %s: %s", event, name, error)


def _post(url: str, fields: dict[str, str]) -> None:
    """POST the fields, with ``subject`` and ``text`` for people (Slack and Mattermost show ``text``), as JSON.

    Raises:
        Unsent: refused, or no answer. What httpx says may hold the URL, so of an answer only its code is repeated.
    """
    from httpx import HTTPStatusError, RequestError
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    try:
        check_webhook(url)
    except ValueError as error:
        raise Unsent(f"MAGRPO_NOTIFY_WEBHOOK {error}") from None
    subject, body = text_of(fields)
    values = fields | {"text": f"{subject}\n{body}"}
    template = {key: "{{" + key + "}}" for key in ("subject", *values)}
    block = CustomWebhookNotificationBlock.model_validate(
        {"name": "magrpo", "url": url, "json_data": template, "secrets": values, "timeout": _TIMEOUT_S}
    )
    host = urlsplit(url).hostname
    try:
        block.notify(body, subject)
    except HTTPStatusError as error:
        raise Unsent(f"{host} answers {error.response.status_code}") from None
    except RequestError as error:
        raise Unsent(f"{host} does not answer ({type(error).__name__})") from None


def _use_block(name: str, fields: dict[str, str]) -> None:
    """Send through a block that the Prefect server keeps.

    Raises:
        Unsent: no server, no such block, or its service did not take it. What the service says may hold its address.
    """
    if prefect_target() is None:
        raise Unsent("it lies on a Prefect server, and none is named (PREFECT_API_URL)")
    import prefect.blocks.notifications  # noqa: F401  makes the types of blocks known
    from httpx import HTTPError
    from prefect.blocks.abstract import NotificationBlock, NotificationError
    from prefect.blocks.core import Block

    try:
        block = Block.load(name)
    except ValueError:
        raise Unsent("the Prefect server has no such block") from None
    except HTTPError as error:
        raise Unsent(f"the Prefect server does not answer ({type(error).__name__})") from None
    if not isinstance(block, NotificationBlock):
        raise Unsent("it is no notification block")

    async def notify(block: NotificationBlock) -> None:
        subject, body = text_of(fields)
        with block.raise_on_failure():
            await block.notify(body, subject)

    try:
        asyncio.run(notify(block))
    except (NotificationError, HTTPError, OSError) as error:
        raise Unsent(f"its service did not take it ({type(error).__name__})") from None
