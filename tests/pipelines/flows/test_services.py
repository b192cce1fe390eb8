"""The Prefect server that the user has chosen, by PREFECT_API_URL: reached before the first stage, or named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from magrpo.errors import ConfigError
from pipelines.cli import main
from pipelines.flows import local_server
from pipelines.flows.local_server import LocalServer, ServerError, find_fault
from pipelines.flows.train import mark_killed, name_server
from tests.pipelines.micro import write_config
from tests.servers import answering

REMEDY = "; start that server, unset the variable, or run with --local"


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/api"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_CHOSEN_S", 0.0)


def reach(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    with LocalServer(Path("nowhere")) as server:
        server.wait_until_ready()


@pytest.mark.parametrize(
    "url", ["localhost:4200/api", "nonsense", "http://host:port/api", "http:///api", "ftp://h/api"]
)
def test_a_misspelt_address_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"PREFECT_API_URL = {url!r}: it is not an address such as http://127.0.0.1:4200/api{REMEDY}"
    with pytest.raises(ConfigError) as refused:
        reach(url, monkeypatch)
    assert str(refused.value) == message
    assert find_fault(url) == "it is not an address such as http://127.0.0.1:4200/api"


@pytest.mark.parametrize(
    ("code", "kind", "fault"),
    [
        (500, "application/json", "it answers 500"),
        (404, "text/html", "it answers 404"),
        (200, "text/html", "it answers text/html, so it is not Prefect's API; the address must end in /api"),
    ],
)
def test_a_server_that_answers_wrongly_is_named(
    code: int, kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(code, kind) as server, pytest.raises(ServerError) as named:
        reach(f"{server}/api", monkeypatch)
    assert str(named.value) == f"PREFECT_API_URL = '{server}/api': {fault}{REMEDY}"


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:9/api", "http://nobody.invalid/api"):
        with pytest.raises(ServerError, match=r"PREFECT_API_URL = .*: it does not answer \(.*run with --local"):
            reach(url, monkeypatch)
    monkeypatch.setattr(local_server, "_TIMEOUT_S", 0.5)
    with silent() as url, pytest.raises(ServerError, match="it does not answer; start that server"):
        reach(url, monkeypatch)
    with pytest.raises(ServerError) as named:
        reach("http://me:secret@127.0.0.1:9/api", monkeypatch)
    assert "secret" not in str(named.value)


def test_a_schedule_is_not_told_to_run_without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with LocalServer(Path("nowhere"), schedules=True) as server, pytest.raises(ServerError) as named:
        server.wait_until_ready()
    assert str(named.value).endswith("; start that server, or unset the variable")


def test_a_server_that_refuses_a_run_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wrong key, or when its address has a wrong path."""
    with answering(401, "application/json") as server:
        url = f"{server}/api".replace("//", "//me:s%5Ecret@")
        reach(url.replace("%5E", "^"), monkeypatch)
        with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ServerError) as named, name_server():
            mark_killed("run", {})
    where = url.replace("me:s%5Ecret", "***")
    said = str(named.value)
    assert said.startswith(f"the Prefect server at {where} (PREFECT_API_URL) failed: Client error '401 ")
    assert f"'{where}/" in said
    assert "cret" not in said


def test_a_server_that_refuses_a_schedule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(401, "application/json") as server:
        url = f"{server}/api".replace("//", "//me:secret@")
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url}):
            assert main(["schedule", str(write_config(tmp_path)), "--cron", "0 0 29 2 *"]) == 1
    said = capsys.readouterr()
    where = url.replace("me:secret", "***")
    assert f"magrpo: the Prefect server at {where} (PREFECT_API_URL) failed: Client error '401 " in said.err
    assert "secret" not in said.err + said.out
    assert "Traceback" not in said.err


def test_a_server_that_stays_away_from_a_schedule_is_named() -> None:
    """Prefect's loop, which asks for due runs, then raises its error in groups."""
    error = ExceptionGroup("loops", [ExceptionGroup("loop", [RuntimeError("Service exceeded error threshold.")])])
    failed = r"\(PREFECT_API_URL\) failed: Service exceeded error threshold\.$"
    with pytest.raises(ServerError, match=failed), name_server((RuntimeError, ExceptionGroup)):
        raise error
