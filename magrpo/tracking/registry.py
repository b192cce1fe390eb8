"""MLflow's model registry: a team of agents as one registered model, each trained team a version of it.

Agents learn to work with one another, so the weights of all of them are one version, which moves as a whole. The alias
``champion`` names the best version so far. MLflow keeps ``latest`` for itself: ``models:/NAME/latest`` is always the
newest version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from magrpo.tracking.connection import make_database, quieten_mlflow, usable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
"""The alias of the best version."""
_LENGTH = 5000  # of descriptions and tags: MLflow's columns; SQLite takes more, PostgreSQL does not
_REST = "\nThe rest is in `README.md` among the files of this version.\n"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a registered model: a folder of the artifacts of an MLflow run."""

    number: int
    source: str
    """Where the folder is."""
    mlflow_run_id: str
    tags: dict[str, str]


class ModelRegistry:
    """The registered model ``model`` in the store at ``uri``; every method raises ``Unavailable`` if MLflow fails it.

    Nothing is asked of MLflow before the first method is called.
    """

    def __init__(self, uri: str, model: str) -> None:
        quieten_mlflow()
        self.uri, self.model = uri, model

    def champion(self) -> Version | None:
        """The version with the alias, if there is one."""
        with usable(self.uri):
            found = self._client.search_registered_models(f"name = '{self.model}'")
            number = found[0].aliases.get(CHAMPION) if found else None
            return None if number is None else _version(self._client.get_model_version(self.model, number))

    def register(self, mlflow_run_id: str, weights: Path, label: str) -> Version:
        """The version whose folder is ``team/<label>`` of the run's artifacts, made from ``weights`` if need be.

        ``label`` must tell different weights of one run apart.
        """
        place = f"team/{label}"
        with usable(self.uri):
            client = self._client
            source = f"{client.get_run(mlflow_run_id).info.artifact_uri}/{place}"
            if not client.search_registered_models(f"name = '{self.model}'"):
                client.create_registered_model(self.model, description="A team of agents, trained together by magrpo.")
            known = client.search_model_versions(f"name = '{self.model}' and run_id = '{mlflow_run_id}'")
            same = [version for version in known if version.source == source]
            client.log_artifacts(mlflow_run_id, str(weights), place)
            return _version(same[0] if same else client.create_model_version(self.model, source, mlflow_run_id))

    def describe(self, version: Version, folder: Path, text: str, tags: Mapping[str, str]) -> None:
        """Put the files of ``folder`` beside the weights, and Markdown and tags on the page of the version.

        Sections at the end of a long text are left out there; it should be a ``README.md`` in the folder, too.
        """
        with usable(self.uri):
            run = self._client.get_run(version.mlflow_run_id)
            place = version.source.removeprefix(f"{run.info.artifact_uri}/")
            self._client.log_artifacts(version.mlflow_run_id, str(folder), place)
            self._client.update_model_version(self.model, str(version.number), description=_shortened(text))
        self.tag(version, tags)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        with usable(self.uri):
            for key, value in tags.items():
                self._client.set_model_version_tag(self.model, str(version.number), key, value[:_LENGTH])

    def crown(self, number: int | None) -> None:
        """Give the alias to the version of this number, or to none."""
        with usable(self.uri):
            if number is None:
                self._client.delete_registered_model_alias(self.model, CHAMPION)
            else:
                self._client.set_registered_model_alias(self.model, CHAMPION, str(number))

    def read(self, version: Version, file: str) -> str:
        """The text of one file of the version's folder."""
        with TemporaryDirectory() as folder:
            return self._fetch(f"{version.source}/{file}", Path(folder)).read_text(encoding="utf-8")

    def download(self, version: Version, target: Path) -> None:
        """The version's folder as ``target``, which is whole once it is there; one that is there is kept."""
        if target.exists():
            return
        with TemporaryDirectory(dir=target.parent, prefix=".") as partial:
            self._fetch(version.source, Path(partial)).rename(target)

    def _fetch(self, source: str, folder: Path) -> Path:
        from mlflow.artifacts import download_artifacts

        with usable(self.uri):
            inside = folder / "fetched"  # which MLflow makes, or puts the file or folder into
            found = download_artifacts(
                artifact_uri=source, dst_path=str(inside), tracking_uri=self.uri, registry_uri=self.uri
            )
            return Path(found)

    @property
    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        make_database(self.uri)
        return MlflowClient(self.uri, registry_uri=self.uri)


def _version(found: ModelVersion) -> Version:
    return Version(int(found.version), str(found.source), str(found.run_id), dict(found.tags))


def _shortened(text: str) -> str:
    """The text, less the sections at its end for which there is no room."""
    if len(text) <= _LENGTH:
        return text
    end = text.rfind("\n## ", 0, _LENGTH - len(_REST))
    return text[: end if end > 0 else _LENGTH - len(_REST)] + _REST
