"""Faults of the machine: full disks, permissions, limits; each is one line with a remedy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from magrpo.process import faults
from magrpo.process.faults import describe_fault, name_full_disk
from pipelines import cli
from tests.pipelines.micro import write_config


def make_error(number: int, path: str | None = "runs/a") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (make_error(errno.ENOSPC), "runs/a: No space left on device; free some space, or choose another disk with "),
        (make_error(errno.EROFS), "runs/a: Read-only file system; choose a folder that you may write to, with root="),
        (make_error(errno.EACCES), "runs/a: Permission denied; choose a folder that you may write to, with root="),
        (make_error(errno.ENOTDIR), "runs/a: Not a directory; there is a file where a folder is needed"),
        (make_error(errno.ENAMETOOLONG), "runs/a: File name too long; choose a shorter name"),
        (make_error(errno.EMFILE, None), "Too many open files; raise ulimit -n"),
        (make_error(errno.ECONNREFUSED, None), "Connection refused"),
        (RuntimeError("can't start new thread"), "can't start new thread; raise ulimit -u and -v, or the container's "),
        (MemoryError(), "out of memory; raise ulimit -v, or the container's memory limit"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), "out of memory; raise ulimit -v"),
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of"),
            "CUDA out of memory. Tried to allocate 2.00 GiB; magrpo train --dry-run shows what uses ",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`; magrpo train --dry-run ",
        ),
        (RuntimeError("a bug"), ""),
    ],
)
def test_a_fault_of_the_machine_is_one_line_with_its_remedy(error: OSError | RuntimeError, text: str) -> None:
    assert describe_fault(error).startswith(text)
    assert bool(describe_fault(error)) == bool(text)


def test_a_root_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    long = "x" * 300
    for root in ("taken", long):
        assert cli.main(["train", "embedded", f"root={root}", "--name", "a"]) == 1
        said = capsys.readouterr()
        assert said.err.startswith(f"magrpo: {tmp_path / root / 'a'}: ")
        assert (said.out, said.err.count("\n")) == ("", 1)
    assert cli.main(["train", "embedded", "--name", long]) == 2


def fail_to_write(path: Path) -> None:
    raise make_error(errno.ENOSPC, str(path))


def test_a_library_that_does_not_say_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="unexpected pos"), name_full_disk(tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 970944 vs 970832")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(faults, "_write_probe", fail_to_write)
    with pytest.raises(OSError, match="No space left on device"), name_full_disk(tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 970944 vs 970832")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"), name_full_disk(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"), name_full_disk(tmp_path):
        raise make_error(errno.ENOSPC, None)
    with pytest.raises(OSError, match=r"Too many open files$"), name_full_disk(tmp_path):
        raise make_error(errno.EMFILE, None)


FULL = """
cd "$1"; shift; mount -t tmpfs -o size=1400k tmpfs runs
"$@" train run.toml --local --name full; echo exit $?
mount -o remount,size=100m runs
"$@" resume full --local; echo exit $?
"""


@pytest.mark.slow
def test_a_run_on_a_full_disk_is_resumed_once_there_is_room(tmp_path: Path) -> None:
    config = write_config(tmp_path, iterations=6)
    magrpo = [sys.executable, "-c", "import sys; from pipelines.cli import main; sys.exit(main())"]
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*inside, "sh", "-c", FULL, "sh", str(config.parent), *magrpo]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 1", "exit 0"], done
    assert f"{config.parent}/runs/full: No space left on device; free some space" in done.stderr
    assert "finished work is kept" in done.stderr
    assert "Traceback" not in done.stderr
