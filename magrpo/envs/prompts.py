"""What agents are shown by the environments: prompts by section and role, and feedback, from ``prompts.toml``."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

_FILE = Path(__file__).with_suffix(".toml")
PROMPTS: Mapping[str, Mapping[str, str]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
