"""What this project sets in the environment before libraries are imported: quiet, offline, patient.

Values that are set already are left alone. MLflow's are set by :mod:`magrpo.tracking`. Imports no prefect.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
QUIET = {
    "DO_NOT_TRACK": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Threads that wait sleep: with other work on the machine, threads that spin made an iteration six times longer.
    "OMP_WAIT_POLICY": "PASSIVE",
    # It says everything twice, and what it says when a hub is out of reach comes as one error at the end.
    "HF_HUB_VERBOSITY": "error",
    # Progress bars of the libraries, loading weights for one, show once they have something to tell.
    "TQDM_DELAY": "3",
    # Off: its first report meets an empty database and greets a newcomer with a traceback.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A fresh database takes 10-30 s; the default of 20 s fails on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # A server that is gone is asked again for 8.5 minutes; the default of 5 ends after one, too soon for a restart.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
    # The console shows progress; Prefect adds what went wrong. Log lines stay on this machine: one request less a task.
    "PREFECT_LOGGING_LEVEL": "WARNING",
    # What ends a run is raised and told once, by the command; these would put its traceback before that, up to twice.
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "CRITICAL",
    # While a server is away: one warning for each event that is lost is enough.
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}


def shorten_path(path: Path) -> str:
    """The path relative to the working directory, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def find_command(name: str) -> str:
    """What to type here to call a command of this Python environment."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) or not beside.exists() else shorten_path(beside)


def prepare_environment() -> None:
    """Set ``HOME`` and every variable of ``QUIET`` that is not set yet; exempt this machine from proxies."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        Path.home()
    except RuntimeError:  # neither HOME nor a passwd entry, which keeps Prefect and MLflow from being imported
        os.environ["HOME"] = "/"  # as container runtimes do
    reach_loopback_directly()


def reach_loopback_directly() -> None:
    """Exempt ``LOOPBACK`` from the proxies of the environment, for this process and its children.

    Every HTTP client of httpx sets up all proxies of the environment when it is made, also for a server that needs
    none. So variables that httpx cannot use are removed, with a warning: with them no client could be made.
    """
    proxies = {name: os.environ[name] for name in os.environ if name.lower() in _PROXIES and os.environ[name]}
    for name, url in proxies.items():
        if reason := _why_unusable(url):
            log.warning("the environment variable %s is ignored: %s", name, reason)
            del os.environ[name]
    if proxies:
        exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        hosts = [host.strip() for host in exempt.split(",") if host.strip()]
        missing = [] if "*" in hosts else [host for host in LOOPBACK if host not in hosts]
        # Both spellings alike: most libraries read the lower-case one first, some read one only.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*hosts, *missing])


def _why_unusable(url: str) -> str:
    """Why httpx cannot use a proxy, without its URL, which may hold a password; empty if it can."""
    import httpx  # takes a tenth of a second, and few machines have a proxy

    try:
        scheme = httpx.Proxy(url if "://" in url else f"http://{url}").url.scheme
    except (httpx.InvalidURL, ValueError):
        return "it is not the URL of an HTTP or SOCKS proxy"
    if scheme.startswith("socks") and find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio (pip install 'httpx[socks]')"
    return ""


def prefect_target() -> str | None:
    """The API that the user has told Prefect to use, by environment or active profile; None: no server chosen."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not path.is_file():
        return None
    profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None
