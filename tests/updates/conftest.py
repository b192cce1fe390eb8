"""What updates are tested with: models with two kinds of head, and a folder for a batch with a non-finite loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GraniteConfig

from tests.tiny import tiny_base, tiny_config


@pytest.fixture(scope="module", params=["linear head", "scaled logits"])
def any_base(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is a linear layer, and one that does more to its logits."""
    if request.param == "linear head":
        return base
    plain = tiny_config()
    scales = {"logits_scaling": 2.0, "attention_multiplier": plain.head_dim**-0.5}  # else scores of attention are huge
    config = GraniteConfig(**plain.to_dict() | {"model_type": "granite"} | scales)
    return tiny_base(tmp_path_factory.mktemp("scaled"), config)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "failed-batch"
