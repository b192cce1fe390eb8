"""The precision of a run on a CPU is the processor's faster one, and stays what it was at the start."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.planning.precision import settle_dtype
from magrpo.run.store import RunStore
from magrpo.training.execute import execute
from pipelines.arguments import locate_config
from tests.pipelines.micro import write_config
from tests.tiny import tiny_config
from tests.training.test_execute import Reached, stop_before_loop


def embedded(folder: Path, *overrides: str) -> RunConfig:
    """The embedded run on the CPU with the base model in ``folder``."""
    agents = [f"agents.{i}.model={folder}" for i in (0, 1)]
    return load_config(locate_config("embedded"), [*agents, "model.device=cpu", "model.dtype=auto", *overrides])


def measure_fast() -> float:
    """A processor that multiplies in bfloat16 1.9 times as fast as in float32."""
    return 1.9


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The configuration of a Llama of more than 100 million parameters, without its weights."""
    tiny_config(vocab_size=32_000, hidden_size=2048, num_layers=1).save_pretrained(tmp_path / "large")
    return tmp_path / "large"


def test_auto_becomes_the_faster_precision(large: Path) -> None:
    said: list[str] = []
    assert settle_dtype(embedded(large), said.append, measure_fast).model.dtype == "mixed"
    assert settle_dtype(embedded(large), said.append, lambda: 1.2).model.dtype == "float32"
    assert said == [
        "model.dtype: mixed; this processor multiplies in bfloat16 1.9 times as fast as in float32",
        "model.dtype: float32; this processor multiplies in bfloat16 1.2 times as fast as in float32",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=float32",),
        ("model.device=cuda",),
        ('engine={kind="vllm"}',),
        ("agents.0.weights=full", "agents.1.weights=full"),
    ],
)
def test_other_runs_are_left_as_they_are(large: Path, overrides: tuple[str, ...]) -> None:
    config = embedded(large, *overrides)
    assert settle_dtype(config, pytest.fail, measure_fast) == config


def test_a_base_without_a_context_window_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    config = embedded(tmp_path, "lora.target_modules=['in_proj']")
    with pytest.raises(ConfigError, match=r"does not state max_position_embeddings or vocab_size; add the longest"):
        settle_dtype(config, pytest.fail)


def test_families_whose_gain_was_not_measured_stay_in_float32(tmp_path: Path) -> None:
    tiny_config("qwen3", vocab_size=32_000, hidden_size=2048, num_layers=1).save_pretrained(tmp_path)
    config = embedded(tmp_path)
    assert settle_dtype(config, pytest.fail, measure_fast) == config


def test_a_small_base_stays_in_float32(base: Path) -> None:
    assert settle_dtype(embedded(base), pytest.fail, measure_fast).model.dtype == "auto"


def test_a_run_keeps_the_precision_that_it_started_with(tmp_path: Path, large: Path) -> None:
    agents = [f"agents.{i}.model={large}" for i in (0, 1)]
    store = RunStore.create(load_config(write_config(tmp_path), [*agents, "model.dtype=auto"]), "kept")

    def attempt() -> str:
        with pytest.raises(Reached):
            execute(store.path.parent, "kept", stop_before_loop, {})
        return store.config().model.dtype

    started_with = attempt()
    assert started_with in ("mixed", "float32")
    for dtype in ("mixed", "float32"):  # one of them is the faster one here
        config = store.config()
        store.write_config(config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}))
        assert attempt() == dtype
