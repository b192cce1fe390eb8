"""Which isolation level is used, and what is refused."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from magrpo.process.children import send_signal
from magrpo.sandboxes import SandboxError, levels
from magrpo.sandboxes.jail import seccomp
from magrpo.sandboxes.jail.confine import Level
from magrpo.sandboxes.jail_command import JailSpec, LevelUnavailable
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.types import Execution, IsolationLevel
from tests.process_state import use_temporary_folder
from tests.processes import assert_all_end

from .conftest import open_pool
from .hostile import CORPUS
from .world import World

SPEC = JailSpec(PoolSandbox().make_limits(), "")
# A probe's stopped process: tells its number and waits.
STOPPING = """
from magrpo.sandboxes import levels
with levels.start_stopped_process() as stopped:
    print(stopped, flush=True)
    input()
"""


def test_auto_takes_the_strongest_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert levels.choose_level(SPEC, "auto").level == "namespaces"
    assert [record.message for record in caplog.records] == ["sandbox level: namespaces"]


def test_without_bubblewrap_it_says_how_to_get_it_and_uses_landlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    isolation = levels.choose_level(SPEC, "auto")
    assert isolation.level == "landlock"
    assert set(isolation.refused) == {"namespaces", "namespaces-flat"}
    assert "apt-get install bubblewrap" in caplog.text


def test_what_a_killed_probe_left_behind_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_temporary_folder(monkeypatch, tmp_path)
    (tmp_path / "magrpo-probe-0dead123").mkdir()
    with levels.make_targets() as (first, *_), levels.make_targets() as (second, *_):
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_temporary_files_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    use_temporary_folder(monkeypatch, long)
    with pytest.raises(SandboxError, match=r"TMPDIR = .*long.* is too long for the path of a socket; set TMPDIR=/tmp"):
        PoolSandbox().open()


def test_the_stopped_process_of_a_probe_that_is_killed_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:
        assert probe.stdout is not None
        stopped = psutil.Process(int(probe.stdout.readline()))
        status = stopped.status()
        probe.kill()
    try:
        assert status == psutil.STATUS_STOPPED
        assert_all_end([stopped])
    finally:
        send_signal([stopped], signal.SIGKILL)


def test_a_level_that_does_not_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.* or accept sandbox.level = 'landlock'"):
        levels.choose_level(SPEC, "namespaces-flat")


def test_none_needs_the_config_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.ALLOW_NONE, raising=False)
    with pytest.raises(SandboxError, match=levels.ALLOW_NONE):
        levels.choose_level(SPEC, "none")
    monkeypatch.setenv(levels.ALLOW_NONE, "1")
    assert levels.choose_level(SPEC, "none").level == "none"


def test_nothing_falls_through_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(spec: JailSpec) -> None:
        raise LevelUnavailable(f"{spec.level} is broken")

    monkeypatch.setenv(levels.ALLOW_NONE, "1")
    monkeypatch.setattr(levels, "examine_level", unavailable)
    with pytest.raises(SandboxError, match="landlock is broken"):
        levels.choose_level(SPEC, "auto")


def test_the_first_process_of_a_container_finds_the_same_level() -> None:
    """Its number is that of the candidate in the candidate's own namespace, which may send itself signals."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces of processes cannot be made here")
    probe = "import os; from magrpo.sandboxes.pool import PoolSandbox; print(os.getpid(), PoolSandbox().probe().level)"
    done = subprocess.run([*unshare, sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", PoolSandbox().probe().level]


def test_the_probe_gets_through_without_isolation() -> None:
    """The probe's own harm is real: without isolation it reads, writes and connects."""
    with pytest.raises(LevelUnavailable) as refusal:
        levels.examine_level(JailSpec(SPEC.limits, "none"))
    for attempt in ("read", "write", "connect", "connect_unix", "send_udp", "left a trace outside"):
        assert attempt in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["read_secret", "write_target", "udp", "unix_socket", "sysv_shared_memory", "new_file"]
)
def test_the_checks_of_the_hostile_corpus_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without isolation the same checks find the harm done."""
    monkeypatch.setenv(levels.ALLOW_NONE, "1")
    [program] = [program for program in CORPUS if program.name == name]
    pool = open_pool(level="none", workers=1)
    world = World(pool)
    try:
        [report] = pool.run([Execution(world.aim(program.source), "f", "assert f(1) == 'expected'")])
        with pytest.raises(AssertionError):
            getattr(world, program.harm if program.harm != "nothing_left" else "target_untouched")(report)
    finally:
        if name == "sysv_shared_memory":
            subprocess.run(["ipcrm", "-M", "0x4d41"], check=True)
        world.close()
        pool.close()


ORDINARY = "--reuid 61874 --regid 61874 --clear-groups --inh-caps=-all --bounding-set=-all"
CONTAINER = "--inh-caps=-all --bounding-set=-all,+setuid,+setgid,+kill,+chown,+dac_override"


@pytest.mark.parametrize(
    ("privileges", "levels", "found"),
    [
        (ORDINARY, ["namespaces", "landlock"], [{"namespaces"}, {"landlock"}]),
        (CONTAINER, ["auto"], [{"namespaces-flat", "landlock"}]),
        ("--inh-caps=-all --bounding-set=-all", ["auto", "landlock"], [{"namespaces-flat", "landlock"}, {"landlock"}]),
    ],
    ids=["an ordinary user", "root of a container", "root without capabilities"],
)
def test_without_the_privileges_of_root(
    tmp_path: Path, privileges: str, levels: list[str], found: list[set[str]]
) -> None:
    """An ordinary user gets the strongest level; root that lacks capabilities gets what the probe accepts."""
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0:
        pytest.skip("every other test runs as an ordinary user already")
    if not python.exists() or f"{sys.version_info[0]}.{sys.version_info[1]}" not in str(python.resolve()):
        pytest.skip("needs a system interpreter of the same version that every user can read")
    root = Path(__file__).parents[2]
    if privileges.startswith("--reuid") and not all(folder.stat().st_mode & 0o001 for folder in (root, *root.parents)):
        pytest.skip("needs a checkout that every user can read")
    code = (
        "from magrpo.sandboxes.pool import PoolSandbox\nfrom magrpo.types import Execution\n"
        f"for level in {levels}:\n    pool = PoolSandbox(level=level, workers=1).open()\n"
        "    [report] = pool.run([Execution('def f(n):\\n    return n', 'f', 'assert f(1) == 1')])\n"
        "    print(report.status, report.level)\n    pool.close()\n"
    )
    site = Path(pytest.__file__).parents[1]
    done = subprocess.run(
        ["setpriv", *privileges.split(), str(python), "-c", code],
        env={"PYTHONPATH": f"{root}:{site}", "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["pass"] * len(levels), done.stderr
    assert all(line[1] in accepted for line, accepted in zip(lines, found, strict=True)), lines
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_of_system_calls_are_those_of_the_kernel_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed")
    lines = [line.replace("__NR3264_", "__NR_").split() for line in Path(header).read_text().splitlines()]
    known = {line[1]: int(line[2]) for line in lines if len(line) > 2 and line[0] == "#define" and line[2].isdigit()}
    column = list(seccomp.ARCHITECTURES).index(machine)
    table = {name: numbers[column] for group in seccomp.CALLS.values() for name, numbers in group.items()}
    compared = {name: number for name, number in table.items() if number >= 0 and f"__NR_{name}" in known}
    assert len(compared) > 100
    assert {name: known[f"__NR_{name}"] for name in compared} == compared


def test_every_system_call_that_is_named_has_a_number() -> None:
    assert list(seccomp.CALLS) == ["never", "pretended", "foreign", "alone", "conditional"]
    named = [(name, numbers) for group in seccomp.CALLS.values() for name, numbers in group.items()]
    assert len(named) == len(dict(named)), "no system call is in two groups"
    for _, numbers in named:
        assert len(numbers) == len(seccomp.ARCHITECTURES)
        assert numbers[0] >= 0


def test_a_kernel_that_cannot_ask_about_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(machine=os.uname().machine, release="5.4.0-42-generic")
    monkeypatch.setattr(os, "uname", lambda: old)
    with pytest.raises(OSError, match=r"5\.5"):
        Level("namespaces-flat", SPEC.limits, [])
    assert not Level("namespaces", SPEC.limits, []).asks


def test_small_limits_of_programs_do_not_weaken_the_level() -> None:
    assert PoolSandbox(memory_mib=64, processes=1, test_s=0.01).probe() == IsolationLevel("namespaces", {})
