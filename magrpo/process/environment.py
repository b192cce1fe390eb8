"""Environment variables that make libraries quiet, offline and patient, set before the libraries are imported.

Variables that are already set are kept. :mod:`magrpo.tracking` sets those of MLflow. Imports no Prefect.
"""

import logging
import os
import shutil
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from magrpo.errors import ConfigError, first_line

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which proxies must not see."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
QUIET = {
    "DO_NOT_TRACK": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Waiting threads sleep. If they spin while other programs run, an iteration takes six times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # torch's profiler logs that it starts and stops.
    "KINETO_LOG_LEVEL": "6",
    # huggingface_hub logs everything twice; an unreachable hub is reported as one error at the end.
    "HF_HUB_VERBOSITY": "error",
    # Progress bars of libraries (downloads, ...) appear only if they take longer than this.
    "TQDM_DELAY": "3",
    # The first analytics report on an empty database prints a traceback.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A fresh database takes 10-30 s; the default of 20 s fails on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # 8 retries take 8.5 minutes; the default of 5 gives up after one minute, too soon for a restart of the server.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
    # Prefect logs only problems, and only on this machine: the console shows progress.
    "PREFECT_LOGGING_LEVEL": "WARNING",
    # The command reports the error that ends a run; these loggers would first print its traceback, up to twice.
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "CRITICAL",
    # While the server is down, each lost event already causes one warning; this logger would add another.
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}


def set_verbosity(*, quiet: bool, verbose: bool) -> None:
    """Set how much the runs of this process and its children print; ``verbose`` also shows messages of level INFO.

    Without either flag the environment decides, by ``MAGRPO_VERBOSITY``: ``quiet``, ``normal`` or ``verbose``.
    Raises ConfigError if both are given.
    """
    if quiet and verbose:
        raise ConfigError("give either --quiet or --verbose")
    if quiet or verbose:
        os.environ["MAGRPO_VERBOSITY"] = "quiet" if quiet else "verbose"
    if os.environ.get("MAGRPO_VERBOSITY") == "verbose":
        for name in ("magrpo", "pipelines"):
            logging.getLogger(name).setLevel(logging.INFO)


def is_quiet() -> bool:
    """Whether runs print only results, warnings and errors."""
    return os.environ.get("MAGRPO_VERBOSITY") == "quiet"


def shorten_path(path: Path) -> str:
    """The path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def find_command(name: str) -> str:
    """The words that call a command of this Python environment from the working directory."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) or not beside.exists() else shorten_path(beside)


def prepare_environment() -> None:
    """Set ``HOME`` and every variable of ``QUIET`` that is not set yet; exempt this machine from proxies."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        Path.home()
    except RuntimeError:  # neither HOME nor a passwd entry: Prefect and MLflow could not be imported
        os.environ["HOME"] = "/"  # as container runtimes do
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about a home that it cannot write to
    reach_loopback_directly()


def reach_loopback_directly() -> None:
    """Exempt ``LOOPBACK`` from the proxies of the environment, for this process and its children.

    Variables that httpx cannot use are removed with a warning, because every client sets up all proxies when it is
    created.
    """
    proxies = {name: os.environ[name] for name in os.environ if name.lower() in _PROXIES and os.environ[name]}
    if not proxies:
        return
    import httpx  # loads in 0.1 s, and few machines have a proxy

    for name, url in proxies.items():
        reason = ""  # without the URL, which may hold a password
        try:
            scheme = httpx.Proxy(url if "://" in url else f"http://{url}").url.scheme
            if scheme.startswith("socks") and find_spec("socksio") is None:
                reason = "a SOCKS proxy needs the package socksio (pip install 'httpx[socks]')"
        except (httpx.InvalidURL, ValueError):
            reason = "it is not an HTTP or SOCKS proxy URL"
        if reason:
            log.warning("the environment variable %s is ignored: %s", name, reason)
            del os.environ[name]
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in exempt.split(",") if host.strip()]
    missing = [] if "*" in hosts else [host for host in LOOPBACK if host not in hosts]
    # Most libraries read the lower-case name first, some read only one of the two.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*hosts, *missing])


def prefect_target() -> str | None:
    """The URL of the Prefect API that the environment or the active profile names; None if neither does.

    Raises ConfigError if Prefect's file of profiles cannot be read.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not path.is_file():
        return None
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, Prefect's profiles: {first_line(error)}; correct it, or use --local") from None
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None
