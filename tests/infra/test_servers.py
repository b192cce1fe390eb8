"""Both servers as the units of systemd start them: command line, settings and secrets, ports and folders apart."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from magrpo.process.ports import find_free_ports
from tests.processes import stop_process
from tests.servers import answers

INFRA = Path(__file__).parents[2] / "infra"


@dataclass(frozen=True)
class Server:
    """A running server. ``login`` is NAME:PASSWORD, ``log`` what it printed."""

    url: str
    login: str
    log: Path

    def post(self, path: str, body: object, login: str = "", host: str = "") -> tuple[int, Any]:
        """Status and answer of a POST of JSON, with this login and this Host header if given."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if login:
            request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
        if host:
            request.add_header("Host", host)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None


@contextmanager
def started(unit: str, health: str, login: str, home: Path, env: dict[str, str]) -> Iterator[Server]:
    """The server of a unit, its folders in ``home``, with ``env`` as its EnvironmentFile, until the block ends."""
    [port] = find_free_ports(1)
    command, settings = unit_of(unit, port, home)
    log = home / f"{unit}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | settings | env, cwd=home, stdout=output, stderr=output)
    server = Server(f"http://127.0.0.1:{port}", login, log)
    try:
        deadline = time.monotonic() + 600
        while not answers(server.url + health):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        stop_process(process)


def unit_of(name: str, port: int, home: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and settings of a unit, with its folders in ``home`` and its servers on ``port``."""
    text = (INFRA / "systemd" / f"magrpo-{name}.service").read_text().replace("\\\n", " ")
    text = text.replace("/var/lib/magrpo", str(home)).replace("/etc/magrpo", str(home))
    text = text.replace("/opt/magrpo/.venv/bin", str(Path(sys.executable).parent))
    text = re.sub(r"\b(?:4200|5000)\b", str(port), text)
    (command,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    return shlex.split(command), dict(
        line.split("=", 1) for line in re.findall(r"^Environment=(.+)$", text, re.MULTILINE)
    )


def _readme_settings(names: str) -> dict[str, str]:
    return dict(re.findall(rf"^({names})=(.+)$", (INFRA / "README.md").read_text(), re.MULTILINE))


def make_box(
    home: Path, sockets: Path | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], dict[str, str]]:
    """A box with its folders in ``home``: what its environment file says, and what backup and restore are told.

    ``sockets`` is the folder of a PostgreSQL, in which databases and their owner are made; None for SQLite.
    """
    (home / "runs").mkdir()
    file = home / "magrpo.env"
    subprocess.run([INFRA / "make-env.sh", file], check=True)
    env = dict(line.split("=", 1) for line in file.read_text().splitlines() if line and not line.startswith("#"))
    users = (INFRA / "systemd" / "mlflow-auth.ini").read_text().replace("/var/lib/magrpo", str(home))
    places = {"RUNS": str(home / "runs")}
    if sockets is not None:
        for name, value in {"PGHOST": str(sockets), "PGUSER": "magrpo"}.items():
            monkeypatch.setenv(name, value)
        subprocess.run(["createuser", "-U", "postgres", "magrpo"], check=True)
        for name in ("prefect", "mlflow", "mlflow_auth"):
            subprocess.run(["createdb", "-U", "postgres", "--owner", "magrpo", name], check=True)
        env |= _readme_settings("PREFECT_SERVER_DATABASE_CONNECTION_URL|MLFLOW_BACKEND_STORE_URI")
        env = {name: value.replace("/var/run/postgresql", str(sockets)) for name, value in env.items()}
        users = re.sub("(?m)^database_uri.*", "database_uri = postgresql+psycopg:///mlflow_auth", users)
        places |= _readme_settings("PREFECT_DB|MLFLOW_DB|MLFLOW_AUTH_DB")
    (home / "mlflow-auth.ini").write_text(users)
    return env, places


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_servers_of_one_box(
    database: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for a login, MLflow refuses foreign hosts, and what is in them comes back from a backup."""
    sockets = request.getfixturevalue("postgres") if database == "postgresql" else None
    env, places = make_box(tmp_path, sockets, monkeypatch)
    mlflow_login = f"{env['MLFLOW_TRACKING_USERNAME']}:{env['MLFLOW_TRACKING_PASSWORD']}"
    with ExitStack() as stack:
        prefect = stack.enter_context(started("prefect", "/api/health", env["PREFECT_API_AUTH_STRING"], tmp_path, env))
        mlflow = stack.enter_context(started("mlflow", "/health", mlflow_login, tmp_path, env))

        flow = ("/api/flows/", {"name": "magrpo-train"})
        assert prefect.post(*flow)[0] == 401
        assert prefect.post(*flow, login="magrpo:wrong")[0] == 401
        assert prefect.post(*flow, login=prefect.login)[0] in {200, 201}

        command, settings = unit_of("worker", int(prefect.url.rsplit(":", 1)[1]), tmp_path)
        client = {"PREFECT_API_AUTH_STRING": env["PREFECT_API_AUTH_STRING"]}  # it gets no secret of a server
        worker = subprocess.run(
            [*command, "--run-once"], env=os.environ | settings | client, cwd=tmp_path, capture_output=True, text=True
        )
        assert worker.returncode == 0, worker.stderr
        _, pools = prefect.post("/api/work_pools/filter", {}, login=prefect.login)
        assert [(pool["name"], pool["type"]) for pool in pools] == [("magrpo", "process")]

        experiment = ("/api/2.0/mlflow/experiments/create", {"name": "kept"})
        assert mlflow.post(*experiment)[0] == 401
        assert mlflow.post(*experiment, login="admin:wrong")[0] == 401
        assert mlflow.post(*experiment, login=mlflow.login, host="attacker.example")[0] == 403
        assert mlflow.post(*experiment, login=mlflow.login)[0] == 200

        listening = _listening_addresses({prefect.url, mlflow.url})
        assert listening == {"127.0.0.1"}
        backed_up = subprocess.run(
            [INFRA / "backup.sh", tmp_path / "backups"], env=os.environ | places, capture_output=True, text=True
        )
        assert backed_up.returncode == 0, backed_up.stderr

    (backup,) = (tmp_path / "backups").iterdir()
    if database == "sqlite":
        places = {"RUNS": str(tmp_path / "restored")}
    restored = subprocess.run(
        [INFRA / "restore.sh", "--replace", backup], env=os.environ | places, capture_output=True, text=True
    )
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.split() == [
        "prefect:",
        "restored",
        "mlflow:",
        "restored",
        "mlflow-auth:",
        "restored",
        "artifacts:",
        "restored",
    ]
    assert _ask(places, "prefect", "SELECT name FROM flow") == ["magrpo-train"]
    assert "kept" in _ask(places, "mlflow", "SELECT name FROM experiments")
    assert _ask(places, "mlflow-auth", "SELECT username FROM users") == ["admin"]


def _listening_addresses(urls: set[str]) -> set[str]:
    """Local IPv4 addresses on which the ports of ``urls`` are open, from the kernel's table."""
    ports = {int(url.rsplit(":", 1)[1]) for url in urls}
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in ports:
                addresses.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address)
    return addresses


def _ask(places: dict[str, str], name: str, query: str) -> list[str]:
    """First column of a query to a restored database."""
    if "MLFLOW_DB" in places:
        url = places[{"prefect": "PREFECT_DB", "mlflow": "MLFLOW_DB", "mlflow-auth": "MLFLOW_AUTH_DB"}[name]]
        call = ["psql", "-X", "-At", "-c", query, url]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
    file = {"prefect": "prefect/prefect.db", "mlflow": "mlflow.db", "mlflow-auth": "mlflow-auth.db"}[name]
    with closing(sqlite3.connect(Path(places["RUNS"]) / file)) as connection:
        return [row[0] for row in connection.execute(query)]
