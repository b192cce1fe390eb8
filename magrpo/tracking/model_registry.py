"""MLflow's model registry: a team of agents as one registered model, each trained team a version of it.

Agents learn to work with one another, so the weights of all agents form a single version. The alias ``champion`` names
the best version so far. ``latest`` is reserved by MLflow: ``models:/NAME/latest`` is always the newest version.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from magrpo.files.locks import lock_folder
from magrpo.tracking.connection import make_database, quieten_mlflow, translate_errors, translate_store_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion  # takes seconds

CHAMPION = "champion"
"""The alias of the best version."""
_LENGTH = 5000
"""Longest description or tag, in characters, that fits MLflow's columns. SQLite would accept more."""
_REST = "\nThe rest is in `README.md` among the files of this version.\n"


@dataclass(frozen=True, slots=True)
class TeamVersion:
    """One version of a registered model: a folder among the artifacts of an MLflow run."""

    number: int
    source: str
    """URI of the folder of the version."""
    mlflow_run_id: str
    tags: dict[str, str]


class ModelRegistry:
    """The registered model ``model`` in the store at ``uri``. Every method raises ``Unavailable`` if MLflow fails.

    No request is sent before the first method is called.
    """

    def __init__(self, uri: str, model: str) -> None:
        quieten_mlflow()
        self.uri, self.model = uri, model

    def find_champion(self) -> TeamVersion | None:
        """The version with the alias ``champion``, if there is one."""
        with self._connect() as client:
            found = client.search_registered_models(f"name = '{self.model}'")
            number = found[0].aliases.get(CHAMPION) if found else None
            return None if number is None else _version(client.get_model_version(self.model, number))

    def register_team(self, mlflow_run_id: str, weights: Path, label: str) -> TeamVersion:
        """Upload ``weights`` as artifact ``team/<label>`` of the run; returns its version, new or existing."""
        folder = f"team/{label}"
        with self._connect() as client:
            source = f"{client.get_run(mlflow_run_id).info.artifact_uri}/{folder}"
            if not client.search_registered_models(f"name = '{self.model}'"):
                client.create_registered_model(self.model, description="Agents trained by magrpo.")
            known = client.search_model_versions(f"name = '{self.model}' and run_id = '{mlflow_run_id}'")
            same = [version for version in known if version.source == source]
            with translate_store_errors():
                client.log_artifacts(mlflow_run_id, str(weights), folder)
            return _version(same[0] if same else client.create_model_version(self.model, source, mlflow_run_id))

    def describe_version(self, version: TeamVersion, folder: Path, text: str, tags: Mapping[str, str]) -> None:
        """Upload the files of ``folder`` beside the weights, and set the version's description (Markdown) and tags.

        A description that is too long is cut and refers to ``README.md``, which the folder should hold.
        """
        with self._connect() as client:
            run = client.get_run(version.mlflow_run_id)
            target = version.source.removeprefix(f"{run.info.artifact_uri}/")
            with translate_store_errors():
                client.log_artifacts(version.mlflow_run_id, str(folder), target)
            client.update_model_version(self.model, str(version.number), description=shorten_card(text))
        self.tag_version(version, tags)

    def tag_version(self, version: TeamVersion, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        with self._connect() as client:
            for key, value in tags.items():
                client.set_model_version_tag(self.model, str(version.number), key, value[:_LENGTH])

    def set_champion(self, number: int | None) -> None:
        """Move the alias ``champion`` to the version ``number``, or delete it if that is None."""
        with self._connect() as client:
            if number is None:
                client.delete_registered_model_alias(self.model, CHAMPION)
            else:
                client.set_registered_model_alias(self.model, CHAMPION, str(number))

    def read_file(self, version: TeamVersion, file: str) -> str:
        """Read a text file in the folder of the version."""
        with TemporaryDirectory() as folder:
            return self._fetch(f"{version.source}/{file}", Path(folder)).read_text(encoding="utf-8")

    def download_version(self, version: TeamVersion, target: Path) -> None:
        """Download the version's folder as ``target`` in one rename; an existing ``target`` is kept.

        If several processes want the folder, one of them downloads it and the others wait.
        """
        draft = target.with_name(f".{target.name}")
        with lock_folder(target.parent):
            shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
            try:
                if not target.exists():
                    self._fetch(version.source, draft).rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _fetch(self, source: str, folder: Path) -> Path:
        from mlflow.artifacts import download_artifacts  # takes seconds

        with translate_errors(self.uri), translate_store_errors():
            inside = str(folder / "fetched")  # MLflow creates it
            return Path(download_artifacts(source, dst_path=inside, tracking_uri=self.uri, registry_uri=self.uri))

    @contextmanager
    def _connect(self) -> Iterator[MlflowClient]:
        from mlflow import MlflowClient  # takes seconds

        with translate_errors(self.uri):
            make_database(self.uri)
            yield MlflowClient(self.uri, registry_uri=self.uri)


def _version(found: ModelVersion) -> TeamVersion:
    return TeamVersion(int(found.version), str(found.source), str(found.run_id), dict(found.tags))


def shorten_card(text: str) -> str:
    """Cut the sections at the end of a text that exceed MLflow's limit."""
    if len(text) <= _LENGTH:
        return text
    room = _LENGTH - len(_REST)
    end = text.rfind("\n## ", 0, room)
    if end <= 0:
        end = room
    return text[:end] + _REST
