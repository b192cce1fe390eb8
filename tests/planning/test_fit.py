"""Whether a configuration fits a place: each misfit names the keys and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.planning import fit
from magrpo.plugins import ConfigError
from pipelines.arguments import locate_config

SERVERS = {"engine": {"servers": 2, "gpus": 0}}


def misfits(place: dict[str, Any], *overrides: str) -> list[str]:
    return list(fit.find_misfits(embedded(*overrides), Place.model_validate(place)))


def embedded(*overrides: str) -> RunConfig:
    return load_config(locate_config("embedded"), overrides)


def test_one_process_fits_everything() -> None:
    assert misfits({}) == misfits({}, "model.device=cpu", "engine.kind=vllm") == []


def test_adapters_on_one_base_may_be_on_different_ranks_that_share_the_base() -> None:
    assert misfits({"update": {"ranks": 2, "shard": "base"}}) == []


@pytest.mark.parametrize(
    ("place", "overrides", "words"),
    [
        (
            {"engine": {"servers": 2}, "update": {"ranks": 2, "colocate": True}},
            ["engine.kind=vllm", "model.device=cuda", "train.lag=1", "algo.importance_cap=2"],
            ["update.colocate", "train.lag = 1", "train.lag = 0"],
        ),
        (SERVERS, ["engine.kind=transformers"], ["engine.servers", 'engine.kind = "transformers"']),
        ({"update": {"ranks": 3}}, [], ["update.ranks = 3", "must divide 2, optim.lanes times", "set it to 1, 2"]),
        (
            {"update": {"ranks": 2, "shard": "base"}},
            ["agents.0.weights=full"],
            ['update.shard = "base"', "2 are trained", "update.ranks = 2 must divide optim.lanes = 1"],
        ),
        ({"engine": {"servers": 2}}, ["engine.kind=vllm", "model.device=cpu"], ["engine.gpus = 1", "engine.gpus = 0"]),
        (
            {"update": {"ranks": 2, "gpus": 0}},
            ["model.device=cuda"],
            ["update.gpus = 0", 'model.device = "cuda"', "update.gpus = 1"],
        ),
        (SERVERS, ["engine.kind=vllm", "model.device=cuda"], ["engine.gpus = 0", 'model.device = "cuda"']),
        (
            {"fleet": {"kind": "ray"}, "sandbox": {"nodes": 2}},
            ['sandbox={kind="none"}'],
            ["sandbox.nodes", 'sandbox.kind = "none"'],
        ),
    ],
)
def test_a_misfit_names_keys_and_remedy(
    place: dict[str, Any], overrides: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.importlib.util, "find_spec", lambda _: object())
    [misfit] = misfits(place, *overrides)
    assert [word for word in words if word not in misfit] == []


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit.importlib.util, "find_spec", lambda _: None)
    [misfit] = misfits({"fleet": {"kind": "ray"}})
    assert 'pip install "magrpo[ray]"' in misfit


def test_all_misfits_are_told_at_once() -> None:
    place = Place.model_validate({**SERVERS, "update": {"ranks": 3}})
    with pytest.raises(ConfigError) as refused:
        fit.check_place(embedded("engine.kind=transformers"), place)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "the cluster file (place) does not fit the run"
    ] * 2


def test_servers_on_processors_fit_a_run_on_processors() -> None:
    assert misfits(SERVERS, "engine.kind=vllm", "model.device=cpu") == []


def test_lanes_are_units_of_work() -> None:
    assert fit.count_units(embedded("optim.lanes=4")) == 8
    assert misfits({"update": {"ranks": 8}}, "optim.lanes=4") == []


def test_shared_adapters_are_one_unit_of_work(tmp_path: Path) -> None:
    assert fit.count_units(embedded()) == 2
    assert fit.count_units(embedded("agents.0.weights=shared", "agents.1.weights=shared")) == 1
