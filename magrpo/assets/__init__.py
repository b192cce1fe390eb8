"""Models that ship with the project: one folder each, named in a configuration by the folder's name."""

from pathlib import Path

FOLDER = Path(__file__).parent


def locate_model(model: str) -> str:
    """The folder of a model that ships with the project; any other name unchanged."""
    shipped = FOLDER / model
    return str(shipped) if model.isprintable() and "/" not in model and (shipped / "config.json").is_file() else model
