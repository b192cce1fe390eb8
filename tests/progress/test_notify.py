"""Notices of failure and recovery, received by a real web server; and that nothing hangs on them."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from functools import partial
from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config, load_resolved
from magrpo.config.services import HIDDEN, NotifyConfig
from magrpo.plugins import ConfigError
from magrpo.process.signals import EndedBySignal
from magrpo.progress import notify as notices
from magrpo.progress.notify import Notices, send_notice
from magrpo.progress.state import Attempt, RunState, describe_error, observe_attempt
from magrpo.rewards.coding import CodingReward
from magrpo.run.config_diff import flatten_config
from magrpo.run.store import RunStore
from pipelines.commands.dry_run import show_plan
from tests.pipelines.flows.test_train import fail
from tests.pipelines.micro import command, write_config
from tests.pipelines.receiver import receiving

FIELDS = {"event": "failure", "run_id": "r", "stage": "update, iteration 3 of 20", "reason": "ValueError: {{name}}"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_config(tmp_path, iterations=1), ["notify.webhook=https://example.org/s3cret"])


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def use_webhook(url: str) -> None:
    os.environ["MAGRPO_NOTIFY_WEBHOOK"] = url


def fail_untold(url: str) -> None:
    use_webhook(url)
    fail("update", 1, ValueError)


def test_an_unreachable_webhook_changes_nothing_and_recovery_is_told(tmp_path: Path) -> None:
    path, log = write_config(tmp_path, iterations=1), tmp_path / "log"
    nobody = f"http://127.0.0.1:{closed_port()}/s3cret"
    assert command(["train", str(path), "--name", "run", "--local"], log, partial(fail_untold, nobody)) == 1
    said = log.read_text()
    told = "the notice of a failure could not be sent through the webhook: 127.0.0.1 does not answer (ConnectError)"
    assert said.count("WARNING") == said.count(told) == 1
    assert "update is made to fail" in said
    assert "s3cret" not in said

    again = ["resume", "run", "--root", str(tmp_path / "runs"), "--local"]
    with receiving() as receiver:
        assert command(again, log, partial(use_webhook, receiver.url)) == 0
        assert command(again, log, partial(use_webhook, receiver.url)) == 0
    [recovery] = receiver.posted
    assert recovery["event"] == "recovery"
    assert recovery["subject"] == "magrpo: run run continues after a failure"
    assert recovery["reason"] == "earlier: ValueError: update is made to fail"
    assert recovery["stage"] == "update, iteration 1 of 1"
    assert re.fullmatch(r"training [\d.]+%, held-out [\d.]+% before", recovery["returns"])
    assert recovery["verdict"].startswith("measured once: the joint return on ")
    assert recovery["mlflow"].startswith(
        f"DO_NOT_TRACK=true mlflow ui --backend-store-uri sqlite:///{tmp_path}/runs/mlflow.db, then http"
    )
    assert not (tmp_path / "runs" / "run" / "attempt.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\udcff"])
def test_a_damaged_file_of_the_attempt_counts_as_a_kill(
    config: RunConfig, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Notices, "_send", lambda _self, event, _state, reason: told.append(f"{event}: {reason}"))
    store = RunStore.create(config)
    (store.path / "attempt.json").write_bytes(text.encode(errors="surrogateescape"))
    notices = Notices()
    notices.attempt_started(Attempt(store, config.notify, RunState(1, CodingReward())))
    assert told == ["failure: its process was killed, or its machine went down"]


def test_a_new_champion_is_told(config: RunConfig) -> None:
    with receiving() as receiver:
        notify = NotifyConfig.model_validate({"webhook": receiver.url})
        attempt, observer = (
            Attempt(RunStore.create(config, "run"), notify, RunState(1, CodingReward())),
            Notices(),
        )
        with observe_attempt(attempt, [observer]):
            observer.team_promoted("version 2 of team is now the champion")
    [notice] = receiver.posted
    assert (notice["event"], notice["subject"]) == ("promotion", "magrpo: run run is now the champion")
    assert notice["reason"] == "version 2 of team is now the champion"


@pytest.mark.parametrize(
    ("error", "told"), [(EndedBySignal(signal.SIGTERM), ["EndedBySignal: SIGTERM"]), (KeyboardInterrupt(), [])]
)
def test_a_signal_is_told_and_ctrl_c_is_not(config: RunConfig, error: BaseException, told: list[str]) -> None:
    with receiving() as receiver:
        notify = NotifyConfig.model_validate({"webhook": receiver.url})
        attempt = Attempt(RunStore.create(config, "run"), notify, RunState(1, CodingReward()))
        with pytest.raises(type(error)), observe_attempt(attempt, [Notices()]):
            raise error
    assert [notice["reason"] for notice in receiver.posted] == told


def test_a_webhook_that_refuses_or_hangs_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        config = NotifyConfig.model_validate({"webhook": receiver.url})
        receiver.status = 403
        send_notice(config, FIELDS)
        receiver.status = 204
        monkeypatch.setattr(notices, "PATIENCE_S", 0.2)
        receiver.hold.clear()
        send_notice(config, FIELDS)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        "the notice of a failure could not be sent through the webhook: 127.0.0.1 answers 403",
        "the notice of a failure could not be sent through the webhook: not finished after 0.2 s",
    ]
    assert receiver.posted[0]["reason"] == "ValueError: {{name}}"


def test_services_of_apprise_receive_the_notice(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        service = receiver.url.replace("http://", "json://")
        send_notice(NotifyConfig.model_validate({"urls": [service]}), FIELDS)
        receiver.status = 500
        send_notice(NotifyConfig.model_validate({"urls": [service]}), FIELDS)
    assert receiver.posted[0]["title"] == "magrpo: run r failed"
    assert "reason: ValueError: {{name}}" in receiver.posted[0]["message"]
    lines = [record.getMessage() for record in caplog.records if record.name == "magrpo.progress.notify"]
    assert lines == ["the notice of a failure could not be sent through notify.urls: a service did not accept it"]


def test_a_block_needs_a_server_that_has_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    send_notice(NotifyConfig(block="slack-webhook/ops"), FIELDS)
    assert (
        "block slack-webhook/ops: the notification block is stored on a Prefect server; set PREFECT_API_URL"
        in caplog.text
    )


def test_the_address_is_kept_out_of_what_is_shown(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert flatten_config(config)["notify.webhook"] == HIDDEN
    assert "s3cret" not in config.resolved() + repr(config)
    show_plan(config, None, None)
    assert "s3cret" not in capsys.readouterr().out
    store = RunStore.create(config, "run")
    assert load_resolved(config.resolved()).notify.webhook is None
    assert store.config() == config == load_resolved(config.resolved(secrets=True))


def test_services_are_kept_out_of_records_and_checked(tmp_path: Path) -> None:
    urls = 'notify.urls=["json://example.org/s3cret"]'
    config = load_config(write_config(tmp_path), [urls])
    assert flatten_config(config)["notify.urls"] == HIDDEN
    assert "s3cret" not in config.resolved() + repr(config)
    assert load_resolved(config.resolved()).notify.urls == ()
    assert load_resolved(config.resolved(secrets=True)) == config
    with pytest.raises(ConfigError, match=r"notify[.]urls: must be URLs of apprise") as refused:
        load_config(write_config(tmp_path), ['notify.urls=["nothing://s3cret"]'])
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["ftp://example.org/s3cret", "s3cret", "https:///s3cret", "http://[s3cret"])
def test_what_cannot_be_posted_to_is_refused_without_repeating_it(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"notify[.]webhook: ") as refused:
        load_config(write_config(tmp_path), [f"notify.webhook={url}"])
    assert "s3cret" not in str(refused.value)


def test_an_unusable_address_in_the_environment_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGRPO_NOTIFY_WEBHOOK", "s3cret")
    send_notice(NotifyConfig(), FIELDS)
    assert "the webhook: MAGRPO_NOTIFY_WEBHOOK must be an http:// or https:// URL" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_reason_is_one_line() -> None:
    assert describe_error(ValueError("\n first\nsecond")) == "ValueError: first"
    assert describe_error(TimeoutError()) == "TimeoutError"


def test_where_a_run_stands_is_read_from_its_directory(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, iterations=1))
    store = RunStore.create(config, "run")
    assert RunState.read(store).describe_step() == "prepare"
    log = tmp_path / "log"
    again = ["resume", "run", "--root", str(tmp_path / "runs"), "--local"]
    assert command(again, log, partial(fail, "update", 1, ValueError)) == 1
    state = RunState.read(store)
    assert state.describe_step() == "update, iteration 1 of 1"
    assert (state.trained_iterations, state.num_computed) == (0, 0)
    assert state.training_return is not None
    assert 0 <= state.training_return <= 1
    assert list(state.held_out_returns) == [0]
