"""Notices of failure and recovery, received by a real web server; and that nothing hangs on them."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.config.services import HIDDEN, NotifyConfig
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError
from magrpo.process.ports import find_free_ports
from magrpo.process.signals import EndedBySignal
from magrpo.progress import notify as notices
from magrpo.progress.notify import Notices, send_notice
from magrpo.progress.state import Attempt, RunState, describe_error, observe_attempt
from magrpo.rewards.coding import CodingReward
from magrpo.run.config_diff import flatten_config
from magrpo.run.store import RunStore
from pipelines.cli import main
from pipelines.commands.dry_run import show_plan
from tests.pipelines.micro import command, fail_stage, write_config
from tests.pipelines.receiver import Receiver, receiving
from tests.processes import wait_until

FIELDS = {"event": "failure", "run_id": "r", "stage": "update, iteration 3 of 20", "reason": "ValueError: {{name}}"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_config(tmp_path, iterations=1), ['notify.urls=["json://example.org/s3cret"]'])


def make_attempt(config: RunConfig, receiver: Receiver) -> Attempt:
    """An attempt at a new run, of which ``receiver`` is told."""
    notify = NotifyConfig.model_validate({"urls": [receiver.url]})
    return Attempt(RunStore.create(config, "run"), notify, RunState(1, CodingReward()))


def notify(url: str) -> None:
    os.environ["MAGRPO_NOTIFY_URLS"] = url


def fail_untold(url: str) -> None:
    notify(url)
    fail_stage("update", 1, ValueError)


def test_an_unreachable_service_changes_nothing_and_recovery_is_told(tmp_path: Path) -> None:
    path, log = write_config(tmp_path, iterations=1), tmp_path / "log"
    nobody = f"json://127.0.0.1:{find_free_ports(1)[0]}/s3cret"
    assert command(["train", str(path), "--name", "run", "--local"], log, partial(fail_untold, nobody)) == 1
    said = log.read_text()
    told = "the notice of a failure could not be sent through JSON: the service did not answer or did not accept it"
    assert said.count("WARNING") == said.count(told) == 1
    assert "update is made to fail" in said
    assert "s3cret" not in said
    state = RunState.read(RunStore.open(tmp_path / "runs", "run"))  # where the run stands, from its directory
    assert state.describe_step() == "update, iteration 1 of 1"
    assert (state.trained_iterations, state.num_computed) == (0, 0)
    assert state.training_return is not None
    assert 0 <= state.training_return <= 1
    assert list(state.held_out_returns) == [0]

    again = ["resume", "run", "--root", str(tmp_path / "runs"), "--local"]
    with receiving() as receiver:
        assert command(again, log, partial(notify, receiver.url)) == 0
        assert command(again, log, partial(notify, receiver.url)) == 0
    [recovery] = receiver.posted
    assert recovery["title"] == "magrpo: run run continues after a failure"
    assert recovery["reason"] == "earlier: ValueError: update is made to fail"
    assert recovery["stage"] == "update, iteration 1 of 1"
    assert re.fullmatch(r"training [\d.]+%, held-out [\d.]+% before", recovery["returns"])
    assert recovery["verdict"].startswith("measured once: the joint return on ")
    assert recovery["mlflow"].startswith(
        f"DO_NOT_TRACK=true mlflow ui --backend-store-uri sqlite:///{tmp_path}/runs/mlflow.db, then http"
    )
    assert not (tmp_path / "runs" / "run" / "attempt.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\udcff"])
def test_a_damaged_file_of_the_attempt_counts_as_a_kill(config: RunConfig, text: str) -> None:
    with receiving() as receiver:
        attempt = make_attempt(config, receiver)
        (attempt.store.path / "attempt.json").write_bytes(text.encode(errors="surrogateescape"))
        Notices().attempt_started(attempt)
    [notice] = receiver.posted
    assert (notice["type"], notice["reason"]) == ("failure", "its process was killed, or its machine went down")


def test_a_new_champion_is_told(config: RunConfig) -> None:
    with receiving() as receiver:
        observer = Notices()
        with observe_attempt(make_attempt(config, receiver), [observer]):
            observer.team_promoted("version 2 of team is now the champion")
    [notice] = receiver.posted
    assert (notice["title"], notice["type"]) == ("magrpo: run run is now the champion", "success")
    assert notice["reason"] == "version 2 of team is now the champion"


@pytest.mark.parametrize(
    ("error", "told"), [(EndedBySignal(signal.SIGTERM), ["EndedBySignal: SIGTERM"]), (KeyboardInterrupt(), [])]
)
def test_a_signal_is_told_and_ctrl_c_is_not(config: RunConfig, error: BaseException, told: list[str]) -> None:
    with (
        receiving() as receiver,
        pytest.raises(type(error)),
        observe_attempt(make_attempt(config, receiver), [Notices()]),
    ):
        raise error
    assert [notice["reason"] for notice in receiver.posted] == told


def test_a_run_that_is_refused_before_it_sampled_is_told_without_a_command_to_resume_it(config: RunConfig) -> None:
    """Its folder is deleted."""
    with receiving() as receiver:
        attempt = make_attempt(config, receiver)
        with pytest.raises(ConfigError), observe_attempt(attempt, [Notices()]):
            raise ConfigError("the prompt is too long")
        with pytest.raises(OSError, match="disk"), observe_attempt(attempt, [Notices()]):
            raise OSError("the disk is full")
    resume = attempt.store.format_command("resume", from_anywhere=True)
    assert [posted.get("resume", "") for posted in receiver.posted] == ["", resume]
    assert "the prompt is too long" in receiver.posted[0]["reason"]


def test_a_full_disk_is_told_with_the_run_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("magrpo.run.store.hash_file", fail)
    with receiving() as receiver:
        monkeypatch.setenv("MAGRPO_NOTIFY_URLS", receiver.url)
        assert main(["train", str(write_config(tmp_path, iterations=1)), "--name", "run", "--local"]) == 1
    [posted] = receiver.posted
    assert posted["reason"].startswith(f"OSError: {tmp_path}/runs/run: No space left on device; free some space")


def test_a_full_disk_keeps_no_notice_back(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(notices, "atomic_write", fail)
    with receiving() as receiver:
        attempt = make_attempt(config, receiver)
        with pytest.raises(OSError, match="the first error"), observe_attempt(attempt, [Notices()]):
            raise OSError("the first error")
    [posted] = receiver.posted
    assert "the first error" in posted["reason"]


@pytest.mark.parametrize("lost", [".", "config.json", "place.json"])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), ConfigError("a file is damaged")])
def test_a_run_that_cannot_be_read_keeps_neither_notice_nor_error_back(
    config: RunConfig, lost: str, error: Exception
) -> None:
    def fail(folder: Path) -> None:
        if lost == ".":
            shutil.rmtree(folder)
        else:
            (folder / lost).write_text("{")
        raise error

    with receiving() as receiver:
        attempt = make_attempt(config, receiver)
        with pytest.raises(type(error), match=str(error)), observe_attempt(attempt, [Notices()]):
            fail(attempt.store.path)
    [posted] = receiver.posted
    assert posted["reason"] == describe_error(error)


def test_a_disk_that_was_full_does_not_fail_a_finished_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with receiving() as receiver:
        attempt = make_attempt(config, receiver)
        monkeypatch.setattr(notices, "atomic_write", fail)
        with observe_attempt(attempt, [Notices()]):
            pass
        monkeypatch.setattr(Path, "unlink", fail)
        with observe_attempt(attempt, [Notices()]):
            pass
    assert "attempt.json could not be removed: OSError: No space left on device" in caplog.text


def test_a_service_that_refuses_or_hangs_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        config = NotifyConfig.model_validate({"urls": [receiver.url]})
        receiver.status = 403
        send_notice(config, FIELDS)
        receiver.status = 204
        monkeypatch.setattr(notices, "PATIENCE_S", 0.2)
        receiver.hold.clear()
        send_notice(config, FIELDS)
        receiver.hold.set()
        wait_until(lambda: len(receiver.posted) == 2)  # else the server is gone when a slow thread turns to it
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        "the notice of a failure could not be sent through JSON: the service did not answer or did not accept it",
        "the notice of a failure could not be sent through JSON: not finished after 0.2 s",
    ]
    assert receiver.posted[0]["title"] == "magrpo: run r failed"
    assert receiver.posted[0]["reason"] == "ValueError: {{name}}"


def test_services_are_kept_out_of_records_and_checked(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert flatten_config(config)["notify.urls"] == HIDDEN
    assert "s3cret" not in config.resolved() + repr(config)
    show_plan(config, None, None)
    assert "s3cret" not in capsys.readouterr().out
    assert validate_config(RunConfig, json.loads(config.resolved()), (), "resolved").notify.urls == ()
    store = RunStore.create(config, "run")
    assert store.config() == config
    with pytest.raises(ConfigError, match=r"notify[.]urls: must be URLs of apprise") as refused:
        load_config(write_config(tmp_path), ['notify.urls=["nothing://s3cret"]'])
    assert "s3cret" not in str(refused.value) + caplog.text


def test_an_unusable_address_in_the_environment_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("MAGRPO_NOTIFY_URLS", f"nothing://s3cret {receiver.url}")
        send_notice(NotifyConfig(), FIELDS)
    assert "could not be sent through MAGRPO_NOTIFY_URLS: apprise does not know a URL in it" in caplog.text
    assert "s3cret" not in caplog.text
    assert len(receiver.posted) == 1


def test_a_reason_is_one_line() -> None:
    assert describe_error(ValueError("\n first\nsecond")) == "ValueError: first"
    assert describe_error(TimeoutError()) == "TimeoutError"


def test_a_new_run_stands_at_its_first_step(config: RunConfig) -> None:
    assert RunState.read(RunStore.create(config, "run")).describe_step() == "prepare"
