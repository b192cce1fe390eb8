"""Places: what a file says, what is refused and how, and what a run directory keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.place import Place, load_place
from magrpo.config.run import load_config
from magrpo.planning.fit import find_misfits
from magrpo.plugins import ConfigError
from magrpo.run.files import keep_place, read_place
from magrpo.run.store import RunStore
from pipelines.arguments import locate_config


def write_place(folder: Path, text: str) -> Path:
    path = folder / "place.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nserver = 2", "engine.server: unknown key; did you mean 'servers'?"),
        ("[engine]\nranks = 2", "engine.ranks: unknown key; did you mean 'update.ranks'?"),
        ("[sandbox]\nnode = 2", "sandbox.node: unknown key; did you mean 'nodes'?"),
        ("[updates]\nranks = 2", "updates: unknown key; did you mean 'update'?"),
        ('[fleet]\nkind = "rai"', "fleet.kind: unknown value 'rai'; did you mean 'ray'?"),
        ('[fleet]\naddress = "ray://head:10001"', "fleet.address: the driver must be a node of the cluster"),
        ("[engine]\nservers = -1", "engine.servers: must be the number of servers to start, or addresses"),
        ("[engine]\nservers = true", "engine.servers: must be the number of servers to start, or addresses"),
        ("[engine]\nservers = []", "engine.servers: must be the number of servers to start, or addresses"),
        ('[engine]\nservers = ["10.0.0.5:8000"]', "engine.servers: '10.0.0.5:8000' is not a server address"),
        ('[engine]\nservers = ["http://a:1", "http://a:1/"]', "engine.servers: http://a:1 is named twice"),
        ("[sandbox]\nnodes = 2", "sandbox.nodes needs a cluster"),
        ("[update]\ncolocate = true\nranks = 2", "update.colocate needs update.ranks, and engine.servers as a number"),
        (
            '[update]\nshard = "base"\nranks = 1',
            "update.shard spreads models over ranks: set update.ranks",
        ),
        ('[update]\nshard = "bse"\nranks = 2', "update.shard: unknown value 'bse'; did you mean 'base'?"),
        ("[[agents]]\nname = 'helper'", "is a run configuration, not a cluster file (place)"),
        ("[engine", "cannot be read as TOML"),
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
    box = Place.model_validate({"engine": {"servers": 8}, "update": {"ranks": 8, "colocate": True}})
    assert box.describe() == "8 servers of 1 GPU, 8 ranks, taking turns on the same GPUs"
    cluster = {"fleet": {"kind": "ray"}, "engine": {"servers": ["http://a:1"]}, "sandbox": {"nodes": 4}}
    assert Place.model_validate(cluster).describe() == "Ray cluster auto, 1 external server, sandboxes on 4 nodes"


def test_a_run_keeps_the_last_place_given(tmp_path: Path) -> None:
    store = RunStore.create(load_config(locate_config("embedded"), [f"root={tmp_path}"]), "run")
    keep_place(store, None)
    assert read_place(store) == Place()
    assert sorted(path.name for path in store.path.iterdir()) == ["config.json"]
    two = Place.model_validate({"engine": {"servers": ["http://a:1", "http://b:1"]}, "update": {"ranks": 2}})
    keep_place(store, two)
    keep_place(store, None)
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


def test_only_a_cluster_with_servers_and_ranks_spares_the_driver_a_gpu() -> None:
    both = {"engine": {"servers": 2}, "update": {"ranks": 2}}
    assert Place.model_validate({**both, "fleet": {"kind": "ray"}}).is_elsewhere
    assert not Place.model_validate(both).is_elsewhere
    assert not Place.model_validate({"fleet": {"kind": "ray"}, "engine": {"servers": 2}}).is_elsewhere
