"""The precision of a run on a CPU is the processor's faster one, and stays what it was at the start."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.planning import precision
from magrpo.planning.precision import settle_dtype
from magrpo.run.store import RunStore
from magrpo.training.execute import execute
from magrpo.training.loop import RunStep
from pipelines.arguments import locate_config
from tests.pipelines.micro import write_config
from tests.tiny import tiny_base, tiny_config


def embedded(folder: Path, *overrides: str) -> RunConfig:
    """The embedded run on the CPU with the base model in ``folder``."""
    agents = [f"agents.{i}.model={folder}" for i in (0, 1)]
    return load_config(locate_config("embedded"), [*agents, "model.device=cpu", "model.dtype=auto", *overrides])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies in bfloat16 1.9 times as fast; every base counts as large."""
    monkeypatch.setattr(precision, "measure_speed_up", lambda: 1.9)
    monkeypatch.setattr(precision, "LARGE", 1)


@pytest.mark.usefixtures("fast")
def test_auto_becomes_the_faster_precision(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert settle_dtype(embedded(base), said.append).model.dtype == "mixed"
    monkeypatch.setattr(precision, "measure_speed_up", lambda: 1.2)
    assert settle_dtype(embedded(base), said.append).model.dtype == "float32"
    assert said == [
        "model.dtype: mixed; this processor multiplies in bfloat16 1.9 times as fast as in float32",
        "model.dtype: float32; this processor multiplies in bfloat16 1.2 times as fast as in float32",
    ]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=float32",),
        ("model.device=cuda",),
        ('engine={kind="vllm"}',),
        ("agents.0.weights=full", "agents.1.weights=full"),
    ],
)
def test_other_runs_are_left_as_they_are(base: Path, overrides: tuple[str, ...]) -> None:
    config = embedded(base, *overrides)
    assert settle_dtype(config, pytest.fail) == config


def test_a_base_without_a_context_window_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    config = embedded(tmp_path, "lora.target_modules=['in_proj']")
    with pytest.raises(ConfigError, match=r"does not state max_position_embeddings or vocab_size; add the longest"):
        settle_dtype(config, pytest.fail)


@pytest.mark.usefixtures("fast")
def test_families_whose_gain_was_not_measured_stay_in_float32(tmp_path: Path) -> None:
    config = embedded(tiny_base(tmp_path, tiny_config("qwen3")))
    assert settle_dtype(config, pytest.fail) == config


def test_a_small_base_stays_in_float32(base: Path) -> None:
    assert settle_dtype(embedded(base), pytest.fail).model.dtype == "auto"


class Reached(Exception):
    """The loop would begin."""


@pytest.mark.usefixtures("fast")
def test_a_run_keeps_the_precision_that_it_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore.create(load_config(write_config(tmp_path)), "kept")

    def begin(_: RunStep) -> RunStep:
        raise Reached

    for speed_up in (1.9, 0.6):  # of the processors of two attempts
        monkeypatch.setattr(precision, "measure_speed_up", lambda speed_up=speed_up: speed_up)
        with pytest.raises(Reached):
            execute(store.path.parent, "kept", begin, {})
        assert store.config().model.dtype == "mixed"
