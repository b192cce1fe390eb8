"""backup.sh and restore.sh, there and back, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[2] / "infra"


def _run(script: str, *args: str | Path, **env: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {name: str(value) for name, value in env.items()}
    return subprocess.run([INFRA / script, *args], env=environment, capture_output=True, text=True)


def _backup(folder: Path, **env: str | Path) -> Path:
    before = set(folder.glob("*"))
    result = _run("backup.sh", folder, **env)
    assert result.returncode == 0, result.stderr
    (made,) = set(folder.glob("*")) - before
    return made


def _rows(database: Path) -> list[tuple[int]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT x FROM t ORDER BY x").fetchall()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two databases and an artifact. MLflow's has a committed row that is still in its write-ahead log."""
    runs = tmp_path / "runs"
    for database in (runs / "prefect" / "prefect.db", runs / "mlflow.db"):
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE t (x)")
            connection.execute("INSERT INTO t VALUES (1)")
            connection.commit()
    (runs / "mlartifacts" / "1").mkdir(parents=True)
    (runs / "mlartifacts" / "1" / "weights").write_bytes(bytes(range(256)))
    return runs


def test_sqlite_backup_of_a_database_in_use_comes_back(runs: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(runs / "mlflow.db")) as writer:
        writer.execute("INSERT INTO t VALUES (2)")
        writer.commit()
        writer.execute("INSERT INTO t VALUES (3)")  # not committed
        backup = _backup(tmp_path / "backups", RUNS=runs)
    assert backup.stat().st_mode & 0o077 == 0

    other = tmp_path / "other"
    result = _run("restore.sh", backup, RUNS=other)
    assert result.returncode == 0, result.stderr
    assert _rows(other / "mlflow.db") == [(1,), (2,)]
    assert _rows(other / "prefect" / "prefect.db") == [(1,)]
    assert (other / "mlartifacts" / "1" / "weights").read_bytes() == bytes(range(256))


def test_an_archive_that_is_cut_is_no_backup(runs: Path, tmp_path: Path) -> None:
    """The status of ``docker compose run`` that fails is the one with which tar says that a file changed."""
    program = tmp_path / "bin" / "tar"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    result = _run("backup.sh", tmp_path / "backups", RUNS=runs, PATH=f"{program.parent}:{os.environ['PATH']}")
    assert result.returncode != 0
    assert "the archive of the artifacts is incomplete" in result.stderr
    assert list((tmp_path / "backups").iterdir()) == []


def test_restore_replaces_only_when_told(runs: Path, tmp_path: Path) -> None:
    backup = _backup(tmp_path / "backups", RUNS=runs)
    with closing(sqlite3.connect(runs / "mlflow.db")) as connection:
        connection.execute("DELETE FROM t")
        connection.commit()
    (runs / "mlartifacts" / "later").write_text("newer than the backup")

    refused = _run("restore.sh", backup, RUNS=runs)
    assert refused.returncode == 1
    assert "--replace" in refused.stderr
    assert _rows(runs / "mlflow.db") == []

    assert _run("restore.sh", "--replace", backup, RUNS=runs).returncode == 0
    assert _rows(runs / "mlflow.db") == [(1,)]
    assert [path.name for path in (runs / "mlartifacts").iterdir()] == ["1"]


def test_restore_refuses_a_damaged_backup_and_a_database_in_use(runs: Path, tmp_path: Path) -> None:
    backup = _backup(tmp_path / "backups", RUNS=runs)
    with closing(sqlite3.connect(runs / "mlflow.db")) as connection:
        connection.execute("SELECT * FROM t").fetchall()
        in_use = _run("restore.sh", "--replace", backup, RUNS=runs)
    assert (in_use.returncode, "stop the servers" in in_use.stderr) == (1, True)

    with (backup / "artifacts.tar.gz").open("ab") as archive:
        archive.write(b"x")
    damaged = _run("restore.sh", backup, RUNS=tmp_path / "other")
    assert (damaged.returncode, "is damaged" in damaged.stderr) == (1, True)
    assert not (tmp_path / "other").exists()


def test_backup_of_nothing_fails_and_leaves_nothing(tmp_path: Path) -> None:
    result = _run("backup.sh", tmp_path / "backups", RUNS=tmp_path / "empty")
    assert result.returncode == 1
    assert "no database found" in result.stderr
    assert list((tmp_path / "backups").iterdir()) == []


def test_backups_beyond_keep_are_removed_oldest_first(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    for day in (1, 2, 3):
        (folder / f"2001-01-0{day}T000000Z").mkdir(parents=True)
    (folder / "notes").mkdir()
    result = _run("backup.sh", folder, RUNS=runs, KEEP="2")
    assert result.returncode == 0, result.stderr
    names = sorted(path.name for path in folder.iterdir())
    assert (names[0], names[-1], len(names)) == ("2001-01-03T000000Z", "notes", 3)


def test_postgresql_backup_comes_back_as_the_databases_own_user(
    postgres: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", str(postgres))

    def psql(user: str, database: str, command: str) -> str:
        call = ["psql", "-X", "-At", "-v", "ON_ERROR_STOP=1", "-U", user, "-d", database, "-c", command]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()

    secrets = {"POSTGRES_USER": "postgres", "PREFECT_DATABASE_PASSWORD": "one'quote", "MLFLOW_DATABASE_PASSWORD": "two"}
    made = _run("images/postgres-init.sh", PGDATABASE="postgres", **secrets)
    assert made.returncode == 0, made.stderr
    psql("prefect", "prefect", "CREATE EXTENSION pg_trgm")  # as Prefect's first migration does
    for user, database in (("prefect", "prefect"), ("mlflow", "mlflow"), ("mlflow", "mlflow_auth")):
        psql(user, database, "CREATE TABLE t (x int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")

    places = {
        "PREFECT_DB": "postgresql:///prefect?user=prefect",
        "MLFLOW_DB": "postgresql:///mlflow?user=mlflow",
        "MLFLOW_AUTH_DB": "postgresql:///mlflow_auth?user=mlflow",
        "ARTIFACTS": runs / "mlartifacts",
    }
    backup = _backup(tmp_path / "backups", **places)
    psql("mlflow", "mlflow", "DELETE FROM t WHERE x = 1")
    psql("prefect", "prefect", "DROP TABLE t")
    shutil.rmtree(runs / "mlartifacts")

    refused = _run("restore.sh", backup, **places)
    assert (refused.returncode, "is not empty" in refused.stderr) == (1, True)
    restored = _run("restore.sh", "--replace", backup, **places)
    assert restored.returncode == 0, restored.stderr
    for user, database in (("prefect", "prefect"), ("mlflow", "mlflow"), ("mlflow", "mlflow_auth")):
        assert psql(user, database, "SELECT sum(x) FROM t") == "3"
        assert psql("postgres", database, "SELECT tableowner FROM pg_tables WHERE tablename = 't'") == user
    assert (runs / "mlartifacts" / "1" / "weights").exists()
