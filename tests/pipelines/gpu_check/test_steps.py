"""The steps of ``magrpo doctor --gpu``: small on a CPU, as a user runs them on a GPU (``-m gpu``)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magrpo.config.run import load_config
from magrpo.engines.transformers import TransformersEngine
from magrpo.interfaces import Engine, Served
from magrpo.planning.card import GIB
from magrpo_kernels import bench
from pipelines.arguments import locate_config
from pipelines.gpu_check import ceilings, engine, kernels, loss, machine, memory, steps
from pipelines.gpu_check.results import Result
from pipelines.gpu_check.setting import Ceilings, Setting

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
EMBEDDED = locate_config("embedded")


@pytest.fixture(params=DEVICES)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return make_setting(tmp_path, request.param)


def make_setting(folder: Path, device: str = "cpu", *overrides: str) -> Setting:
    config = load_config(EMBEDDED, [f"model.device={device}", *overrides])
    return Setting(config, torch.device(device), folder)


class Large(Setting):
    """Takes the branches of a GPU."""

    is_small = False  # type: ignore[assignment]


def make_large(folder: Path, *overrides: str) -> Setting:
    small = make_setting(folder, "cpu", *overrides)
    return Large(small.config, small.device, small.folder)


def find_result(results: Sequence[Result], name: str) -> Result:
    return next(result for result in results if name in result.name)


def failures(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.verdict == "failed"]


# ------------------------------------------------------------------------------------------------ the steps as they are
def test_the_machine_is_fit_or_says_what_it_lacks(setting: Setting) -> None:
    results = list(machine.check_machine(setting))
    assert [result.name for result in failures(results)] == ([] if not setting.is_small else ["GPU"])
    assert all(result.remedy for result in failures(results))


def test_ceilings_are_measured_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    results = list(ceilings.measure_ceilings(setting))
    assert failures(results) == []
    found = ceilings.find_ceilings(setting)
    assert found.copy_bytes_per_s == pytest.approx(1e12 * (find_result(results, "copy of").value or 0))
    monkeypatch.setattr(Setting, "measure_seconds", lambda *_: pytest.fail("measured again"))
    assert ceilings.find_ceilings(setting) == found


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_right_in_a_process_of_its_own(device: str, tmp_path: Path) -> None:
    """In Triton's interpreter where there is no GPU."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the process takes the GPU")
    shown: list[Result] = []
    report = steps.run_step(steps.STEPS[2], tmp_path, [str(EMBEDDED)], shown.append)
    assert report.failure is None
    assert list(report.results) == shown
    names = {result.name for result in shown}
    assert names >= {f"gradient, {dtype}" for dtype in ("float32", "bfloat16", "float16")}


@pytest.mark.timeout(1800)  # on a GPU
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")  # as torch.compile is imported
def test_the_loss_is_set_beside_floor_and_ceilings(setting: Setting) -> None:
    results = list(loss.measure_loss(setting))
    assert failures(results) == []
    for title in (*bench.TITLES, bench.LOOP):
        assert "by the ceilings" in find_result(results, f"{title}, N ").expected
    assert "not run" in find_result(results, "Liger").found or "ms" in find_result(results, "Liger").found


@pytest.mark.timeout(1800)  # on a GPU the engine starts for minutes
def test_the_engine_is_held_to_the_trainer(setting: Setting) -> None:
    results = list(engine.check_engine(setting))
    assert failures(results) == []
    for name in ("log-probabilities", "same seeds", "version 2", "version 1 after", "top_p", "after sleep", "killed"):
        assert find_result(results, name)


def test_memory_of_an_update_is_set_beside_its_estimate(setting: Setting) -> None:
    results = list(memory.probe_memory(setting))
    assert failures(results) == []
    assert "as --dry-run estimates" in find_result(results, "a token of an update").expected
    assert find_result(results, "completions share the row").found == "yes"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), *DEVICES[1:]])
def test_a_run_that_is_killed_is_resumed(device: str, tmp_path: Path) -> None:
    from pipelines.gpu_check.training import train_twice

    results = list(train_twice(make_setting(tmp_path, device)))
    assert failures(results) == []
    assert [result.name for result in results][-1] == "second iteration"


# ---------------------------------------------------------------------------------------------- what they must not miss
def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.row_loss

    def with_torch(spoil: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        def compute(logits: torch.Tensor, inputs: Any, options: Any, out: torch.Tensor) -> Any:
            losses, logps = right(logits, inputs, replace(options, impl="torch"), out)
            if options.impl == "triton":
                spoil(logps, out)
            return losses, logps

        monkeypatch.setattr(kernels, "row_loss", compute)

    setting, case = make_setting(tmp_path), kernels.Case(1000)
    with_torch(lambda logps, out: None)
    assert max(kernels.measure_errors(setting, case, torch.float32)) < 1
    with_torch(lambda logps, out: logps.add_(1e-4))
    assert kernels.measure_errors(setting, case, torch.float32)[0] > 1
    with_torch(lambda logps, out: out[:, 7].add_(1e-2))
    assert kernels.measure_errors(setting, case, torch.float32)[1] > 1
    with_torch(lambda logps, out: out[:, 7].fill_(torch.nan))
    assert kernels.measure_errors(setting, case, torch.float32)[1] == torch.inf


def test_a_gradient_that_differs_in_place_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.row_loss

    def race(logits: torch.Tensor, inputs: Any, options: Any, out: torch.Tensor) -> Any:
        results = right(logits, inputs, replace(options, impl="torch"), out)
        if logits is out:
            out[0, 0] += 1
        return results

    monkeypatch.setattr(kernels, "row_loss", race)
    result = kernels._check_race(make_setting(tmp_path), 1000)
    assert (result.found, result.verdict) == ("2 of 2 differ", "failed")


class WrongEngine:
    """Serves one version, whichever it is asked for."""

    def __init__(self, behind: Engine, folders: Mapping[str, Path]) -> None:
        self._behind, self._folders = behind, folders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def serve(self, version: int, weights: Mapping[str, Path]) -> Served:
        return self._behind.serve(version, self._folders)


def test_an_engine_with_the_wrong_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the tolerance, of half precision, would let it pass."""
    setting = make_setting(tmp_path)
    monkeypatch.setattr(engine, "GAPS", {torch.float32: 10.0})
    folders = {agent.name: tmp_path / "version-1" / agent.name for agent in setting.config.agents}
    opened = TransformersEngine.open
    monkeypatch.setattr(TransformersEngine, "open", lambda self, host: WrongEngine(opened(self, host), folders))
    config = setting.config.model_copy(update={"engine": TransformersEngine()})
    results = list(engine.check_engine(replace(setting, config=config)))
    [wrong] = failures(results)
    assert wrong.name == "version 2 of the weights"
    assert wrong.remedy


# ------------------------------------------------------------------------------------------------- branches of a GPU
@pytest.mark.parametrize(
    ("driver", "capability", "free", "failed"),
    [
        ("580.1", (9, 0), 0.5, ["memory of the card", "the configuration on this card"]),
        ("580.159.04", (9, 0), 79, []),
        ("", (8, 0), 79, []),
        ("535.10", (9, 0), 79, ["driver"]),
        ("580.1", (7, 5), 79, ["GPU"]),
        ("580.1", (9, 0), 60, ["memory of the card"]),
    ],
)
def test_a_card_that_is_not_fit_is_refused(
    driver: str,
    capability: tuple[int, int],
    free: float,
    failed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "find_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, (80 if free > 1 else 0.5) * GIB))
    results = list(machine.check_machine(make_large(tmp_path)))
    assert [result.name for result in failures(results)] == failed
    assert all(result.remedy for result in failures(results))


def test_a_gpu_that_torch_cannot_use_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or os.path.exists(path))  # noqa: PTH110
    monkeypatch.setattr(machine, "find_driver", lambda: "535.10")
    [missing] = failures(list(machine.check_machine(make_setting(tmp_path))))
    assert "cannot use it (driver 535.10)" in missing.found
    assert "make setup GPU=1" in missing.remedy


def test_the_driver_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, version in (
        ("echo 580.1; echo 580.1", "580.1"),
        ("echo 5; exit 9", ""),
        ("true", ""),
        ("echo [N/A]", ""),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert machine.find_driver() == version
    monkeypatch.setattr(machine, "_ANSWER_S", 0.0)
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    assert machine.find_driver() == "", "it hangs"
    tool.write_text("no program")
    assert machine.find_driver() == ""


def test_a_slow_card_misses_the_share_of_its_data_sheet() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362}
    for name, peak in names.items():
        assert next(figures for part, figures in ceilings.DATA_SHEETS.items() if part in name)[1] == peak
    assert ceilings._compare("copy", 2.9, 0.85 * 3.35, "TB/s").verdict == "ok"
    assert ceilings._compare("copy", 1.9, 0.85 * 3.35, "TB/s").verdict == "missed"
    assert ceilings._compare("copy", 1.9, None, "TB/s").verdict == "note"


def test_tokens_of_the_benchmark_fit_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: dict[str, Any] = {"extra_bytes": 0, "rows": [], "medians_s": {}}
    report = {"ratios": {}, "trained head": nothing, "frozen head": nothing}
    report["arguments"] = {"tokens": 0, "hidden": 0, "device": "cuda"}
    asked: list[list[str]] = []

    def run(words: list[str]) -> None:
        asked.append(words)
        Path(words[-1].partition("=")[2]).write_text(json.dumps(report))

    monkeypatch.setattr(bench, "main", run)
    monkeypatch.setattr(loss, "expect_bytes", lambda *_: 0)
    monkeypatch.setattr(loss, "find_ceilings", lambda _: Ceilings(1e12, 1e15, 1e10))
    for free_gib, tokens in ((15, "--tokens=4096"), (78, "--tokens=16384")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free_gib: (free * GIB, 80 * GIB))
        asked.clear()
        list(loss.measure_loss(make_large(tmp_path)))
        assert tokens in asked[0]
        assert "--no-compile" not in asked[0]
        assert "--hidden=2048" in asked[1]


@pytest.mark.parametrize(
    ("free", "verdict", "says"), [(78, "ok", "at most"), (4, "missed", "set optim.micro_batch_tokens=")]
)
def test_micro_batches_are_advised_by_the_memory_left(
    free: int, verdict: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_large(tmp_path, "optim.micro_batch_tokens=16384")
    policy = memory.Policy.open(setting.config.agents, setting.config.model, setting.config.lora, 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 80 * GIB if free > 70 else 5 * GIB))
    advice = memory._advise_tokens(setting, policy, per_token=1e6)
    assert (advice.verdict, says in advice.expected) == (verdict, True)
    assert memory._advise_tokens(setting, policy, per_token=1e7).verdict == ("missed" if free > 70 else "failed")


def test_an_update_that_does_not_fit_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory.Updater, "gradient", run_out)
    results = list(memory.probe_memory(make_setting(tmp_path)))
    assert [result.name for result in failures(results)] == ["update"]


def test_an_update_that_was_halved_says_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = memory.Updater.gradient

    def halve(updater: Any, *given: Any) -> Any:
        updater.micro_batch_tokens = 700
        return compute(updater, *given)

    monkeypatch.setattr(memory.Updater, "gradient", halve)
    last = list(memory.probe_memory(make_setting(tmp_path)))[-1]
    assert (last.verdict, last.value) == ("missed", 700)
    assert "optim.micro_batch_tokens=700" in last.expected


def test_the_trainer_takes_most_of_the_memory_while_the_engine_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    free = iter([2 * GIB, 8 * GIB, 0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 10 * GIB))
    taken = SimpleNamespace(fill_=lambda _: None)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: events.append(f"take {a[0] / GIB:.1f}") or taken)
    monkeypatch.setattr(engine, "estimate_memory", lambda *_: {"frozen parameters": 1e10, "activations": 1e12})
    monkeypatch.setattr(engine, "find_ceilings", lambda _: Ceilings(1e12, 1e15, 1e10))
    served = SimpleNamespace(generate=lambda _: events.append("generate"), close=lambda: None)
    world: Any = SimpleNamespace(
        ask=lambda _: [],
        folders={1: {}},
        measure_gap=lambda *_: 0.0,
        policy=SimpleNamespace(
            dtype=torch.bfloat16, lineup=SimpleNamespace(release_cached_memory=lambda: events.append("release"))
        ),
        engine=SimpleNamespace(
            serve=lambda *_: served, sleep=lambda: events.append("sleep"), wake=lambda: events.append("wake")
        ),
    )
    setting = make_large(tmp_path, "engine.kind=vllm", "engine.memory_frac=0.7")
    results = list(engine._check_sleep(setting, world))
    assert events[:6] == ["generate", "release", "sleep", "take 6.4", "wake", "generate"]
    again = ["release", "reset", "sleep", "take 0.1", "wake"]
    assert events[6:] == ["generate", *again, *again, "generate"]
    assert find_result(results, "after a sleep that keeps the weights").verdict == "ok"
    assert find_result(results, "sleep and wake").expected.startswith("2.0 s in all")
    released = find_result(results, "memory released")
    assert (released.value, released.verdict) == (6.0, "ok")
    assert released.expected.startswith("5.6 GiB or more")


def test_products_of_a_gpu_have_shapes_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory."""
    ran: list[object] = []
    monkeypatch.setattr(Setting, "measure_seconds", lambda _, run, repeats=0: ran.append(run()) or 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    setting = replace(make_large(tmp_path), device=torch.device("meta"))
    monkeypatch.setattr(ceilings, "measure_link", lambda _: 1.0)
    results = list(ceilings.measure_ceilings(setting))
    assert [result.verdict for result in results if result.expected] == ["missed"] * 4
    assert len(ran) == 7
    assert setting.load_ceilings() is not None
