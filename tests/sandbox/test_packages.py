"""Packages that programs may import: under which names, with which dependencies, and how a failing import is told."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from magrpo.errors import ConfigError
from magrpo.sandboxes import levels
from magrpo.sandboxes.packages import find_packages
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.types import Execution
from tests.process_state import use_temporary_folder

from .conftest import LEVELS, MAIN_LEVELS, open_pool
from .honest import NUMPY

CHECK = "assert f(4) == 6\nassert f(5) == 10\n"
USUAL = {
    "numpy": "import numpy as np\ndef f(n):\n    return int(np.arange(n).sum())\n",
    "pandas": "import pandas as pd\ndef f(n):\n    return int(pd.Series(range(n)).sum())\n",
    "scikit-learn": (
        "from sklearn.linear_model import LinearRegression\ndef f(n):\n    line = LinearRegression()\n"
        "    return sum(range(round(line.fit([[1], [2]], [1, 2]).predict([[n]])[0])))\n"
    ),
    "Pillow": "from PIL import Image\ndef f(n):\n    return sum(range(Image.new('L', (n, 1)).size[0]))\n",
    "PyYAML": "import yaml\ndef f(n):\n    return sum(yaml.safe_load(str(list(range(n)))))\n",
    "python-dateutil": (
        "from dateutil.parser import parse\ndef f(n):\n    return sum(range(parse(f'2020-01-0{n}').day))\n"
    ),
    "matplotlib": (
        "import io\nimport matplotlib.pyplot as plt\ndef f(n):\n    figure, axes = plt.subplots()\n"
        "    axes.plot(range(n))\n    axes.set_title('a title')\n    file = io.BytesIO()\n    figure.savefig(file)\n"
        "    assert file.getvalue().startswith(b'\\x89PNG')\n    return sum(range(n))\n"
    ),
    "sympy": "import sympy\ndef f(n):\n    k = sympy.Symbol('k')\n    return int(sympy.summation(k, (k, 0, n - 1)))\n",
    "requests": "import requests\ndef f(n):\n    return sum(range(n)) * requests.codes.ok // 200\n",
    "scipy.stats": "from scipy import stats\ndef f(n):\n    return sum(range(n)) + round(stats.norm.cdf(0) - 0.5)\n",
}
"""Names as people write them, each with a program that needs the package."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where distributions can be installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, sources: Mapping[str, str], requires: Sequence[str] = ()) -> None:
    """Install a distribution of files with these sources, which depends on others."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {other}\n" for other in requires)
    files = {**sources, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    for path, source in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(source)


def refuse(*packages: str, **options: object) -> str:
    """The error about packages that cannot be used."""
    with pytest.raises(ConfigError) as refusal:
        PoolSandbox.model_validate({"kind": "pool", "packages": packages, "workers": 1, **options}).open()
    assert str(refusal.value).startswith("sandbox.packages: ")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (LEVELS[0], ["numpy", "Pillow", "matplotlib", "scipy.stats"]),
        *(pytest.param(level, list(USUAL), marks=pytest.mark.slow) for level in LEVELS),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_usual_packages_under_the_names_that_people_write(level: str, names: list[str]) -> None:
    usual = open_pool(level=level, workers=1, packages=names)
    *reports, for_test = usual.run([*(Execution(USUAL[name], "f", CHECK) for name in names), NUMPY])
    usual.close()
    assert [case.status for case in for_test.cases] == ["pass", "pass"], "tests may import packages, too"
    failed = {name: report.cases for name, report in zip(names, reports, strict=True) if report.status != "pass"}
    assert not failed


@pytest.mark.parametrize("level", MAIN_LEVELS)
def test_dependencies_come_along_and_nothing_else_that_is_installed(site: Path, level: str) -> None:
    sources = {"oddly/__init__.py": "import helping\nfrom .part import VALUE\n", "oddly/part.py": "VALUE = 6\n"}
    install(site, "odd-name", sources, ["helper-dist"])
    install(site, "helper-dist", {"helping.py": "", "deeper.py": ""}, ["absent-dist; extra == 'more'"])
    install(site, "stranger", {"strange.py": ""})
    packages = open_pool(level=level, workers=1, packages=["odd-name"])
    allowed, version, strange = packages.run(
        [
            Execution("import deeper, helping, oddly\ndef f(): return oddly.VALUE\n", "f", "assert f() == 6"),
            Execution("from importlib.metadata import version\nf = version\n", "f", "assert f('Odd.Name') == '1.0'"),
            Execution("import strange\ndef f(): return 6\n", "f", "assert f() == 6"),
        ]
    )
    packages.close()
    assert [allowed.status, version.status] == ["pass", "pass"], (allowed.cases, version.cases)
    assert strange.status == "load_error"
    assert "No module named 'strange'" in strange.cases[0].message


def test_modules_may_be_named_instead_of_distributions(site: Path) -> None:
    install(site, "odd-name", {"oddly/__init__.py": "", "oddly/part.py": "VALUE = 6\n", "broken.py": "1 / 0\n"})
    assert list(find_packages(["oddly"]).modules) == ["oddly"]
    assert list(find_packages(["oddly.part"]).modules) == ["oddly.part"]
    assert list(find_packages(["odd-name"]).modules) == ["broken", "oddly"]
    part = open_pool(workers=1, packages=["oddly.part"])
    source = "import sys\ndef f(): return sys.modules['oddly.part'].VALUE\n"
    [report] = part.run([Execution(source, "f", "assert f() == 6")])
    part.close()
    assert report.status == "pass", report.cases
    assert "'broken' of 'odd-name' cannot be imported" in refuse("odd-name")


def test_the_module_of_the_same_name_stands_for_a_distribution(site: Path) -> None:
    install(site, "Some.Thing", {"some_thing/__init__.py": "", "pytools.py": "", "_some_thing.py": ""})
    install(site, "some-more", {"some_thing_else.py": "", "_private.py": "", "some.libs/lib.so": "", "tool.pth": ""})
    assert list(find_packages(["some-thing"]).modules) == ["some_thing"]
    assert list(find_packages(["some-more"]).modules) == ["some_thing_else"]


@pytest.mark.parametrize("level", ["auto", *LEVELS[1:], "none"])
@pytest.mark.parametrize(
    ("source", "requires", "message"),
    [
        ("import lost", ["lost-dist"], "(ModuleNotFoundError: No module named 'lost'); pip install lost-dist,"),
        ("import os\nos.kill(os.getpid(), 9)", [], "(it ended without a message)"),
    ],
    ids=["raises", "dies"],
)
def test_a_failing_import_is_an_error_at_every_level(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: str,
    source: str,
    requires: list[str],
    message: str,
) -> None:
    monkeypatch.setenv(levels.ALLOW_NONE, "1")
    install(site, "good", {"good.py": ""})
    install(site, "bad", {"bad.py": source}, requires)
    refusal = refuse("good", "bad", level=level)
    assert "'bad' cannot be imported in the sandbox " + message in refusal
    assert refusal.endswith("or remove 'bad'")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "the level stays as it is"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import lost", "(ModuleNotFoundError: No module named 'lost'); pip install lost and add it"),
        ("raise ValueError('out of order')", "(ValueError: out of order); reinstall it"),
        ("raise SystemExit", "(it ended without a message); reinstall it"),
    ],
    ids=["undeclared dependency is missing", "raises", "exits"],
)
def test_the_remedy_for_a_failing_import_follows_from_its_exception(site: Path, source: str, message: str) -> None:
    install(site, "bad", {"bad.py": source})
    refusal = refuse("bad")
    assert "'bad' cannot be imported in the sandbox " + message in refusal
    assert refusal.endswith("or remove 'bad'")


def test_a_dependency_that_is_missing_but_not_imported_does_no_harm(site: Path) -> None:
    install(site, "good", {"good.py": ""}, ["lost-dist", "other-dist; python_version < '3'"])
    packages = open_pool(workers=1, packages=["good"])
    [report] = packages.run([Execution("import good\ndef f(): return 6\n", "f", "assert f() == 6")])
    packages.close()
    assert report.status == "pass"


def test_what_cannot_be_found_is_named(site: Path) -> None:
    install(site, "editable", {"__editable__.editable.pth": ""})
    install(site, "garbled", {"garbled.py": ""}, ["not a requirement !"])
    for name in ("no-such-package", "no_such_module.part", ""):
        assert f"{name!r} is not installed" in refuse(name)
    assert "'editable' lists no modules" in refuse("editable")
    assert "garbled has a dependency that cannot be parsed, 'not a requirement !'" in refuse("garbled")


def test_a_package_that_leaves_no_memory_is_refused(site: Path) -> None:
    install(site, "heavy", {"heavy.py": "HELD = bytearray(100 << 20)\n"})
    refusal = refuse("heavy", memory_mib=64)
    assert "raise sandbox.memory_mib (now 64), or remove some packages" in refusal


def test_a_package_may_take_long_to_import(site: Path) -> None:
    install(site, "slow", {"slow.py": "import time\nwhile time.process_time() < 2.1:\n    pass\n"})
    slow = open_pool(workers=1, packages=["slow"])
    [report] = slow.run([Execution("import slow\ndef f(): return 6\n", "f", "assert f() == 6")])
    slow.close()
    assert report.status == "pass", report.cases


@pytest.mark.parametrize("level", MAIN_LEVELS)
def test_a_package_may_leave_threads_running(site: Path, level: str) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    install(site, "threaded", {"threaded.py": source})
    threaded = open_pool(level=level, workers=1, packages=["threaded"])
    [report] = threaded.run([Execution("import threaded\ndef f(): return 6\n", "f", "assert f() == 6")])
    threaded.close()
    assert report.status == "pass", report.cases


@pytest.mark.parametrize("level", MAIN_LEVELS)
def test_the_addresses_of_packages_do_not_count(site: Path, level: str) -> None:
    """Libraries reserve much: a program may still use as much as its limit says, and no more."""
    install(site, "wide", {"wide.py": "import mmap\nRESERVED = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE)\n"})
    wide = open_pool(level=level, workers=1, packages=["wide"], memory_mib=512)
    source = "def f(mib):\n    return len(bytearray(mib << 20)) >> 20\n"
    fits, exceeds = wide.run([Execution(source, "f", f"assert f({mib}) == {mib}") for mib in (200, 600)])
    wide.close()
    assert (fits.status, exceeds.status) == ("pass", "memory")


WRITES = """
import os, wordy

def f():
    written = []
    for attempt in (
        lambda: open(os.path.join(wordy.FOLDER, 'mine'), 'w'),
        lambda: os.mkdir(os.path.join(wordy.FOLDER, 'mine')),
        lambda: os.open(wordy.FOLDER, os.O_TMPFILE | os.O_RDWR),
        lambda: os.chmod(wordy.FOLDER, 0o700),
    ):
        try:
            attempt()
        except OSError:
            continue
        written.append(attempt)
    return len(written), os.path.exists(os.path.join(wordy.FOLDER, 'cache'))
"""


@pytest.mark.parametrize("level", MAIN_LEVELS)
def test_what_packages_write_at_import_is_gone_before_programs_run(
    site: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = "import os\nFOLDER = os.environ['MPLCONFIGDIR']\nopen(os.path.join(FOLDER, 'cache'), 'w').write('x')\n"
    cache += "os.mkdir(os.path.join(FOLDER, 'deep'))\n"
    install(site, "wordy", {"wordy.py": cache})
    with tempfile.TemporaryDirectory() as temporary:  # its path is short enough for the sockets of the probe
        use_temporary_folder(monkeypatch, Path(temporary))
        wordy = open_pool(level=level, workers=1, packages=["wordy"])
        wanted = "f()[1] is False" if level == "namespaces" else "f() == (0, False)"
        [report] = wordy.run([Execution(WRITES, "f", f"assert {wanted}")])
        wordy.close()
        assert report.status == "pass", report.cases
        assert os.listdir(temporary) == []  # noqa: PTH208
