"""Uploading a folder of agents to a repository on the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of httpx or of its successor
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not marked as exported

from magrpo.plugins import ConfigError, first_line


def check_repository(repository: str) -> None:
    """Raise ConfigError unless ``repository`` has the form ``owner/name``."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: {error}") from None
    if "/" not in repository:
        raise ConfigError(f"--push {repository}: include the owner: --push YOU/{repository}")


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Upload ``folder`` to ``repository``, which is created if missing; returns its URL.

    Subfolders of the same name are replaced; other files stay. ``private`` applies only to a new repository. Raises
    ConfigError if the hub cannot be reached or refuses.
    """
    hub = HfApi()
    try:
        url = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload agents trained with magrpo",
            delete_patterns=[f"{path.name}/*" for path in folder.iterdir() if path.is_dir()],
        )
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        refused = isinstance(error, LocalTokenNotFoundError) or error.response.status_code in (401, 403)
        remedy = "log in with: hf auth login" if refused else "try again later"
        raise ConfigError(f"--push {repository}: {hub.endpoint} refused: {first_line(error)}; {remedy}") from None
    except OfflineModeIsEnabled:
        raise ConfigError(f"--push {repository}: HF_HUB_OFFLINE is set: unset it") from None
    except (HTTPError, OSError) as error:
        raise ConfigError(f"--push {repository}: {hub.endpoint} cannot be reached: {first_line(error)}") from None
    return str(url)
