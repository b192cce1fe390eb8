"""The notebook of the documentation: its cells run in their order, and it is stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELLS = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    kept = [cell for cell in CELLS if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"])]
    assert kept == []


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", "\n\n".join(CODE)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "rollout.group_sise" in result.stdout, "the cell that shows an error message"
    assert (tmp_path / "notebook-runs" / "first" / "config.json").exists()
