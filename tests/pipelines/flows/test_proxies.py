"""Proxies of the environment: servers on this machine are asked without one, whatever the variables say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import requests

from magrpo.process.environment import LOOPBACK, reach_loopback_directly
from pipelines.flows.local_server import find_fault
from tests.pipelines.micro import command, write_config
from tests.servers import answering

NAMES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
NOBODY = "http://127.0.0.1:9"
"""A port that nothing listens on."""
SOCKS = "socks5://127.0.0.1:9"
GARBAGE = "http://proxy:port"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that whatever a test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def server_port() -> Iterator[int]:
    """Yield the port of a server on 127.0.0.1 whose answers ``find_fault`` accepts as those of Prefect's API."""
    with answering(200, "application/json") as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    "variables",
    [
        {"HTTP_PROXY": NOBODY},
        {"http_proxy": NOBODY, "HTTPS_PROXY": NOBODY},
        {"ALL_PROXY": NOBODY, "no_proxy": "corp.example"},
        {"HTTP_PROXY": NOBODY, "NO_PROXY": "corp.example", "no_proxy": ""},
        {"ALL_PROXY": SOCKS},
        {"all_proxy": "socks5h://127.0.0.1:9"},
        {"HTTPS_PROXY": GARBAGE},
        {"http_proxy": "ftp://127.0.0.1:9"},
        {"HTTP_PROXY": "nobody.invalid:3128", "https_proxy": "://"},
    ],
    ids=lambda variables: ",".join(f"{name}={value}" for name, value in variables.items()),
)
def test_servers_on_loopback_are_reached_directly(
    variables: dict[str, str], server_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reach_loopback_directly()
    assert find_fault(f"http://127.0.0.1:{server_port}") == ""
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{server_port}/"
        assert httpx.get(url).status_code == requests.get(url, timeout=60).status_code == 200


def test_other_hosts_keep_their_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", NOBODY)
    monkeypatch.setenv("NO_PROXY", "corp.example, localhost")
    for _ in range(2):
        reach_loopback_directly()
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1"
    assert os.environ["HTTP_PROXY"] == NOBODY
    assert "refused" in find_fault("http://other.invalid")
    with pytest.raises(httpx.ConnectError, match="refused"):  # by the proxy; the host has no address
        httpx.get("http://other.invalid/")


def test_a_proxy_that_no_client_can_use_is_named_once_and_without_its_password(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@proxy:1080")
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:port")
    for _ in range(2):
        reach_loopback_directly()
    assert sorted(record.getMessage() for record in caplog.records) == [
        "the environment variable ALL_PROXY is ignored: a SOCKS proxy needs the package socksio "
        "(pip install 'httpx[socks]')",
        "the environment variable https_proxy is ignored: it is not an HTTP or SOCKS proxy URL",
    ]
    assert not {"ALL_PROXY", "https_proxy"} & set(os.environ)


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "")
    before = dict(os.environ)
    reach_loopback_directly()
    assert dict(os.environ) == before
    monkeypatch.setenv("http_proxy", NOBODY)
    monkeypatch.setenv("no_proxy", "*")
    reach_loopback_directly()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "*"
    assert "::1" in LOOPBACK


@pytest.mark.slow
def test_a_run_with_a_server_of_its_own_behind_proxies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"HTTP_PROXY": NOBODY, "https_proxy": GARBAGE, "ALL_PROXY": SOCKS, "NO_PROXY": "", "no_proxy": ""}
    arguments = ["train", str(write_config(tmp_path, iterations=1)), "--name", "proxied"]
    assert command(arguments, log, environment=environment) == 0, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("is ignored") == 2
