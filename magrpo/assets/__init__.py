"""Models that ship with the project: one folder each, named in a configuration by the folder's name.

``coopcode-base`` writes programs and ``writing-base`` texts about notes; tutorials and tests train them on a CPU in
minutes. docs/embedded.md says how they were made. Begin with ``locate_model``, through which all code finds them.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def looks_like_folder(model: str) -> bool:
    """Whether a model is written like a folder, not like an id of the hub."""
    return Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1


def locate_model(model: str) -> str:
    """The folder of a model that ships with the project; any other name unchanged."""
    shipped = FOLDER / model
    return str(shipped) if model.isprintable() and "/" not in model and (shipped / "config.json").is_file() else model


def name_base(model: str) -> str:
    """Name a base model for others: by its own name, or by the absolute path of its folder if it has none."""
    is_shipped = locate_model(model) != model
    if not is_shipped and Path(model).is_dir():
        return str(Path(model).resolve())
    return model
