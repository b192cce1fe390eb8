"""Places: what a file says, what is refused and how, and what a run directory keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from magrpo.config.place import Place, load_place
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.planning.place_check import find_misfits
from magrpo.run.files import keep_place, read_place
from magrpo.run.lock import hold_run
from magrpo.run.store import RunStore
from pipelines.arguments import locate_config


def write_place(folder: Path, text: str) -> Path:
    path = folder / "place.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[samplers]\ncounts = 2", "samplers.counts: unknown key; did you mean 'count'?"),
        ("[jails]\nnode = 2", "jails.node: unknown key; did you mean 'nodes'?"),
        ("[rank]\ncount = 2", "rank: unknown key; did you mean 'ranks'?"),
        ('address = "ray://head:10001"', "address: the driver must be a node of the cluster"),
        ('address = "auto"', "address needs actors to place: set samplers.count"),
        ("[samplers]\ncount = -1", "samplers.count: "),
        ("colocate = true\n[ranks]\ncount = 2", "colocate lets samplers and ranks share GPUs"),
        (
            "colocate = true\n[samplers]\ncount = 2\ngpus = 2\n[ranks]\ncount = 2",
            "colocate needs one GPU for each sampler and rank",
        ),
        ('[ranks]\nshard = "base"\ncount = 1', "ranks.shard spreads models over ranks: set ranks.count"),
        ("[samplers]\ngpus = 2", "samplers.gpus is the number of GPUs of each: set samplers.count, or remove it"),
        ("[ranks]\ngpus = 1", "ranks.gpus is the number of GPUs of each: set ranks.count, or remove it"),
        ('[ranks]\nshard = "bse"\ncount = 2', "ranks.shard: unknown value 'bse'; did you mean 'base'?"),
        ("[[agents]]\nname = 'helper'", "is a run configuration, not a cluster file (place)"),
        ("[ranks", "cannot be read as TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_by_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write_place(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_place(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_names_one_beside_it(tmp_path: Path) -> None:
    write_place(tmp_path, "")
    with pytest.raises(ConfigError, match=r"plase\.toml: no such file; did you mean .*place\.toml\?"):
        load_place(tmp_path / "plase.toml")


def test_an_empty_file_is_one_process(tmp_path: Path) -> None:
    place = load_place(write_place(tmp_path, ""))
    assert place.is_default
    assert place.describe() == "one process"


def test_a_place_in_words() -> None:
    box = Place.model_validate({"colocate": True, "samplers": {"count": 8}, "ranks": {"count": 8}})
    assert box.describe() == "8 samplers, 8 ranks, taking turns on the same GPUs, on this machine"
    spread = {"count": 2, "shard": "base"}
    cluster = Place.model_validate({"address": "auto", "ranks": spread, "jails": {"nodes": 1}})
    assert cluster.describe() == "2 ranks with models spread over them, sandboxes on 1 node, on the Ray cluster auto"
    assert cluster.list_tags()["magrpo.ranks"] == "2"


def test_a_run_keeps_the_last_place_given(tmp_path: Path) -> None:
    store = RunStore.create(load_config(locate_config("embedded"), [f"root={tmp_path}"]), "run")
    keep_place(store, None)
    assert read_place(store) == Place()
    assert sorted(path.name for path in store.path.iterdir()) == ["config.json"]
    two = Place.model_validate({"samplers": {"count": 2}, "ranks": {"count": 2}})
    keep_place(store, two)
    keep_place(store, None)
    assert read_place(store) == two
    with hold_run(store), pytest.raises(ConfigError, match=r"run run: process .* is working on it already"):
        keep_place(store, Place())
    assert read_place(store) == two
    keep_place(store, Place())
    assert read_place(store).is_default


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "infra" / "places").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_place_that_ships_fits_a_run_on_gpus(path: Path) -> None:
    place = load_place(path)
    assert not place.is_default
    changes = ["optim.lanes=8", "engine.kind=vllm", "model.device=cuda", "rollout.top_p=1.0"]
    config = load_config(locate_config("coophumaneval"), changes)
    assert [misfit for misfit in find_misfits(config, place) if "not installed" not in misfit] == []


def test_only_samplers_and_ranks_together_spare_the_driver_a_gpu() -> None:
    assert Place.model_validate({"samplers": {"count": 2}, "ranks": {"count": 2}}).is_elsewhere
    assert not Place.model_validate({"samplers": {"count": 2}}).is_elsewhere


@pytest.mark.parametrize(
    ("place", "changes", "words"),
    [
        ({"ranks": {"count": 3}}, [], ["ranks.count = 3", "must divide 2, optim.lanes times", "set it to 1, 2"]),
        (
            {"ranks": {"count": 2, "shard": "base"}},
            ["agents.0.weights=full"],
            ['ranks.shard = "base"', "2 are trained", "ranks.count = 2 must divide optim.lanes = 1"],
        ),
        (
            {"ranks": {"count": 2, "gpus": 1}},
            ["model.device=cpu"],
            ["ranks.gpus = 1", 'model.device = "cpu"', "remove ranks.gpus"],
        ),
        (
            {"samplers": {"count": 2, "gpus": 0}},
            ["model.device=cuda"],
            ["samplers.gpus = 0", 'model.device = "cuda"'],
        ),
        (
            {"colocate": True, "samplers": {"count": 2}, "ranks": {"count": 2}},
            ["train.lag=1", "algo.importance_cap=2", "model.device=cuda"],
            ["colocate", "train.lag = 1", "train.lag = 0"],
        ),
        (
            {"colocate": True, "samplers": {"count": 2}, "ranks": {"count": 2}},
            ["model.device=cpu"],
            ["colocate shares GPUs", 'model.device = "cpu"', "remove colocate"],
        ),
        (
            {"address": "auto", "samplers": {"count": 2}, "ranks": {"count": 2}},
            ["model.device=auto"],
            ['model.device = "auto"', "by this machine's GPUs", 'model.device = "cuda" or "cpu"'],
        ),
        ({"jails": {"nodes": 2}}, [], ["jails.nodes = 2", "this machine is one node", "set address"]),
    ],
)
def test_a_misfit_names_the_keys_and_the_remedy(place: dict[str, object], changes: list[str], words: list[str]) -> None:
    config = load_config(locate_config("embedded"), changes)
    [misfit] = find_misfits(config, Place.model_validate(place))
    assert [word for word in words if word not in misfit] == []


def test_jails_are_of_no_use_to_texts() -> None:
    [misfit] = find_misfits(load_config(locate_config("tldr_cpu")), Place.model_validate({"jails": {"nodes": 1}}))
    assert 'jails.nodes has no effect with sandbox.kind = "none"' in misfit


def test_actors_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(locate_config("embedded"))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert list(find_misfits(config, Place())) == []
    [misfit] = find_misfits(config, Place.model_validate({"ranks": {"count": 2}}))
    assert 'pip install "magrpo[ray]"' in misfit
