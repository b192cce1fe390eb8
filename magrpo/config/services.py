"""Sections of a configuration for the services that a run reports to: MLflow, its model registry and notices."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, SecretStr, SerializationInfo, field_serializer, field_validator, model_validator

from magrpo.plugins import Section

if TYPE_CHECKING:
    from apprise import Apprise

HIDDEN = "***"
"""Shown in place of secrets."""
MAX_EXPERIMENT = 500
"""Maximum length of an experiment's name in MLflow."""


def hide_password(uri: str) -> str:
    """Replace user and password in a URI, for messages."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # unreadable: any part of it may be the password
        return HIDDEN
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}"))


def hide_passwords(text: str) -> str:
    """Replace user and password in every URI of a text, such as a library's message, which may encode them anew."""
    return re.sub(r"://[^/?#\s]*@", f"://{HIDDEN}@", text)


def hide_secrets(key: str, value: object) -> object:
    """Return the value of a dotted key as it may be shown."""
    if key.partition(".")[0] == "notify" and value:
        return HIDDEN
    return hide_password(str(value)) if key == "tracking.uri" and value else value


class TrackingConfig(Section):
    """How runs are recorded in MLflow."""

    uri: str | None = None
    """MLflow tracking URI. None: the environment variable MLFLOW_TRACKING_URI, else an SQLite database in ``root``."""
    experiment: str = "magrpo"
    """Name of the MLflow experiment; on Databricks, an absolute path such as ``/Users/you@example.org/magrpo``."""
    traces: int = Field(3, ge=0)
    """Number of trajectories of held-out problems recorded as traces at each evaluation. 0: none."""
    system_metrics: bool = True
    """Whether MLflow records the use of CPUs, memory, disk, network and GPUs every ten seconds."""

    @field_validator("experiment")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not value.strip() or not value.isprintable() or len(value) > MAX_EXPERIMENT:
            raise ValueError(f"an experiment's name has 1 to {MAX_EXPERIMENT} printable characters")
        return value

    @field_serializer("uri", when_used="json-unless-none")
    def _hide(self, value: str, info: SerializationInfo) -> str:
        return value if (info.context or {}).get("secrets") else hide_password(value)


class RegistryConfig(Section):
    """The trained team as a registered model in MLflow, and the champion among its versions."""

    model: str | None = Field(None, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the registered model; every finished training run adds its agents as one version. None:
    register nothing."""
    continue_from_champion: bool = False
    """Start every agent from the champion's weights, or untrained if there is no champion yet."""
    promote: bool = False
    """Promote the run's team to champion if it is better on held-out problems."""

    @model_validator(mode="after")
    def _needs_a_model(self) -> RegistryConfig:
        for key in ("continue_from_champion", "promote"):
            if self.model is None and getattr(self, key):
                raise ValueError(f"{key} needs the name of a registered model: set registry.model")
        return self


class NotifyConfig(Section):
    """Notices of a run's failure, recovery or promotion."""

    urls: tuple[SecretStr, ...] = ()
    """Services that receive each notice, as apprise URLs: ``slack://...``, ``mailto://...``, ``json://...`` for a
    webhook. Kept out of records. Empty: the environment variable MAGRPO_NOTIFY_URLS, separated by spaces."""

    @field_validator("urls")
    @classmethod
    def _check_services(cls, values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        urls = tuple(value for value in values if value.get_secret_value() != HIDDEN)
        if urls:
            services = make_apprise()
            if not all(services.add(url.get_secret_value()) for url in urls):
                raise ValueError("must be URLs of apprise, such as mailto://user:password@example.org")
        return urls

    @field_serializer("urls", when_used="json-unless-none")
    def _hide(self, values: tuple[SecretStr, ...], info: SerializationInfo) -> list[str]:
        if (info.context or {}).get("secrets"):
            return [value.get_secret_value() for value in values]
        return [HIDDEN] * len(values)


def make_apprise() -> Apprise:
    """An empty list of services for notices. apprise is kept from logging, because it quotes URLs with secrets."""
    from apprise import Apprise  # loads a hundred services

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return Apprise()
