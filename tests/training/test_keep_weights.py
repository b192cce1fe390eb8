"""``train.keep_weights``: weights that nothing needs are deleted; ``--from-stage`` computes them again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from magrpo.asking.teams import find_asked_team
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.experiments.derive import Source, create_evaluation
from magrpo.export.team import TrainedTeam
from magrpo.library import open_run
from magrpo.planning.sizes import estimate_disk
from magrpo.run.files import WEIGHTS, kept_iterations
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.store import RunStore
from tests.pipelines.micro import resume_locally, run_locally, write_config
from tests.training.test_damage import digests

LAGS = {0: [], 1: ["train.lag=1", "algo.importance_cap=2"]}


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 1])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunStore]:
    """A run of five iterations that keeps all weights, and one that keeps the evaluated ones: 0, 2, 4 and 5."""
    path = write_config(tmp_path_factory.mktemp("keep"), iterations=5)
    made = {}
    for kept in ("all", "evaluated"):
        store, *_ = run_locally(load_config(path, [f"train.keep_weights={kept}", *LAGS[request.param]]))
        made[kept] = store
    return made


@pytest.fixture
def copy(runs: dict[str, RunStore]) -> Iterator[RunStore]:
    source = runs["evaluated"].path
    shutil.copytree(source, source.with_name("copy"))
    yield RunStore.open(source.parent, "copy")
    shutil.rmtree(source.with_name("copy"))


def test_the_run_is_the_same_and_smaller(runs: dict[str, RunStore]) -> None:
    assert digests(runs["all"]) == digests(runs["evaluated"])
    assert kept_iterations(runs["all"]) == [0, 1, 2, 3, 4, 5]
    assert kept_iterations(runs["evaluated"]) == [0, 2, 4, 5]
    files = [path for path in runs["evaluated"].path.glob(f"stages/*/update/{WEIGHTS}/*/*") if path.is_file()]
    assert {path.parts[-5] for path in files} == {"00000", "00002", "00004", "00005"}
    for kept, store in runs.items():
        estimated = estimate_disk(store.config(), copies=False)
        [number] = [int(purpose.split()[2]) for purpose in estimated if purpose.startswith("weights of ")]
        assert number == len(kept_iterations(store)), kept
        written = sum(path.stat().st_size for path in store.path.glob(f"stages/*/update/{WEIGHTS}/*/*.safetensors"))
        assert written == pytest.approx(estimated[f"weights of {number} checkpoints"], rel=0.2)


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("00002/rollout.0", marks=pytest.mark.slow),
        "00004/rollout.0",
        pytest.param("00005/rollout.0", marks=pytest.mark.slow),
        "00004/update",
    ],
)
def test_a_lost_stage_that_needs_deleted_weights_is_computed_again_from_stage(copy: RunStore, lost: str) -> None:
    before = digests(copy)
    shutil.rmtree(copy.stage_folder(lost))
    for _ in range(2):  # a stage that needs the lost one may need deleted weights, too
        try:
            resume_locally(copy)
        except ConfigError as error:
            stage = str(error).rpartition("--from-stage ")[2]
            copy.set_aside([step.output for step in steps_to_repeat(copy, copy.config(), stage)])
    resume_locally(copy)
    assert digests(copy) == before
    assert {0, 2, 4, 5} <= set(kept_iterations(copy))


@pytest.mark.parametrize(
    "stage",
    ["rollout:2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("rollout:4", "update:5", "evaluate:4"))],
)
def test_a_run_resumes_from_a_stage_that_needs_deleted_weights(copy: RunStore, stage: str) -> None:
    before = digests(copy)
    copy.set_aside([step.output for step in steps_to_repeat(copy, copy.config(), stage)])
    resume_locally(copy)
    assert digests(copy) == before
    assert kept_iterations(copy) == [0, 2, 4, 5]


def test_agents_whose_weights_are_deleted_are_refused_by_name(runs: dict[str, RunStore]) -> None:
    store = runs["evaluated"]
    root: Path = store.path.parent
    pruned = f"run {store.run_id} has no weights of checkpoint 3; choose one of 0, 2, 4, 5"
    with pytest.raises(ConfigError, match=pruned):
        find_asked_team(store.run_id, root, 3)
    with pytest.raises(ConfigError, match=pruned):
        create_evaluation(Source(store.run_id, 3, root, (), None), None)
    run = open_run(store.path)
    with pytest.raises(ConfigError, match=pruned):
        run.find_weights(3)
    assert all(folder.is_dir() for folder in (*run.find_weights().values(), *run.find_weights(4).values()))
    assert find_asked_team(store.run_id, root, None).title.endswith("after 5 iterations")
    assert any(TrainedTeam.of(store).weights.iterdir())
