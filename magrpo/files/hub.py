"""The Hugging Face hub: what its caches hold, and whether it answers. Imports its library when it is needed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from magrpo.errors import ConfigError

TIMEOUT_S = 5.0
"""How long to wait for the hub's answer."""
_reason_offline = "HF_HUB_OFFLINE is set"
_cache_only: ContextVar[bool] = ContextVar("cache_only", default=False)


class NotCached(ConfigError):
    """A data set is on the hub and not in its cache."""


@contextmanager
def read_cache_only() -> Iterator[None]:
    """Let :func:`check_cached` refuse data sets that would have to be downloaded, while the block lasts."""
    token = _cache_only.set(True)
    try:
        yield
    finally:
        _cache_only.reset(token)


def check_cached(repository: str, file: str = "") -> None:
    """Within :func:`read_cache_only`, raise NotCached if the data set, or this file of it, would be downloaded."""
    if not _cache_only.get():
        return
    if file:
        from huggingface_hub import try_to_load_from_cache  # a quarter of a second

        is_cached = isinstance(try_to_load_from_cache(repository, file, repo_type="dataset"), str)
    else:
        from datasets.config import HF_DATASETS_CACHE  # seconds
        from datasets.naming import camelcase_to_snakecase

        *owner, name = repository.split("/")
        is_cached = (Path(HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(name)])).is_dir()
    if not is_cached:
        raise NotCached(f"the data set {repository} is not in the cache of the Hugging Face hub")


def find_commit(model: str) -> str:
    """Return the commit of a model of the hub that the cache holds and libraries load; empty if it holds none."""
    from huggingface_hub import try_to_load_from_cache  # a quarter of a second

    path = try_to_load_from_cache(model, "config.json")
    return Path(path).parent.name if isinstance(path, str) else ""


def describe_host() -> str:
    """The hub's host, ``huggingface.co`` or that of a mirror."""
    from huggingface_hub import constants  # a quarter of a second

    return urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT


def find_hub_obstacle() -> str:
    """Why the hub cannot be used now, asking it once for a few seconds; empty if it answers."""
    from huggingface_hub import constants  # a quarter of a second

    if constants.is_offline_mode():
        return _reason_offline
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT_S).close()
    except HTTPError:
        return ""  # an answer, if not a friendly one
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, SSLError):  # the hub's library brings certificates of its own
            return ""
        return f"{describe_host()} does not answer ({reason})"
    return ""


def stay_offline(reason: str) -> None:
    """Let this process and its children read the hub's caches without waiting for a network, for this ``reason``."""
    global _reason_offline
    from huggingface_hub import constants  # a quarter of a second

    _reason_offline = reason
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        from datasets import config  # it is loaded already

        config.HF_HUB_OFFLINE = True
