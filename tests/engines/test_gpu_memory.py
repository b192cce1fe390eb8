"""One GPU shared by trainer and vLLM servers: who takes memory, who has given it back before.

No GPU is used: the policy says that it lives on one, and the servers are scripted.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines.auto import AutoEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_arguments import make_arguments
from magrpo.errors import ConfigError
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from tests.engines.scripted import script_servers
from tests.fakes import FakeGpu
from tests.tiny import tiny_base, tiny_policy

# Appends the kind of each call to a file, and "Ready" before it says that it has started. Until then it waits for as
# many servers to be starting as the first argument says.
SERVER = """
import os, sys, time
from multiprocessing.connection import Connection
from pathlib import Path
import msgspec
from magrpo.engines.vllm_server import CreateEngine, Done, ServerCall
events = Path(os.environ["SCRIPT"])
def tell(event):
    with events.open("a") as file:
        file.write(event + "\\n")
channel, decoder = Connection(int(sys.argv[2])), msgspec.msgpack.Decoder(ServerCall)
while True:
    call = decoder.decode(channel.recv_bytes())
    tell(type(call).__name__)
    if isinstance(call, CreateEngine):
        while events.read_text().split().count("CreateEngine") < int(sys.argv[1]):
            time.sleep(0.01)
        tell("Ready")
    channel.send_bytes(msgspec.msgpack.encode(Done()))
"""


class Machine:
    """A policy of two agents with weights of their own, hence two servers, and what happened, in order."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "events"
        self.log.touch()
        base = str(tiny_base(folder / "base"))
        agents = [AgentConfig(name=name, role=name, model=base, weights="full") for name in ("helper", "main")]
        self.policy = Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(), seed=0)
        self.starting = 1
        """How many servers must be starting before one of them is ready."""

    def start_server(self) -> list[str]:
        """The command of a server."""
        self.tell("Spawn")
        return [sys.executable, "-c", SERVER, str(self.starting)]

    def tell(self, event: str) -> None:
        with self.log.open("a") as file:
            file.write(event + "\n")

    def events(self) -> list[str]:
        """What happened since the last call."""
        found = self.log.read_text().split()
        self.log.write_text("")
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> Machine:
    """A ``Machine`` whose log holds the calls of its scripted servers and of ``torch.cuda.empty_cache`` in order."""
    gpu.is_usable = False
    machine = Machine(tmp_path)
    script_servers(monkeypatch, machine.start_server)
    gpu.empty_cache = lambda: machine.tell("empty_cache")
    monkeypatch.setenv("SCRIPT", str(machine.log))
    return machine


def test_on_a_gpu_servers_start_one_after_another_and_wake_to_free_memory(machine: Machine) -> None:
    machine.policy.lineup.device = torch.device("cuda")
    engine = VllmEngine(memory_frac=0.5).open(EngineHost.of(machine.policy))
    try:
        assert machine.events() == ["empty_cache", *["Spawn", "CreateEngine", "Ready"] * 2]
        engine.wake()
        assert machine.events() == [], "they are awake"
        engine.sleep()
        engine.sleep()
        assert machine.events() == ["Sleep", "Sleep"]
        engine.wake()
        assert machine.events() == ["empty_cache", "Wake", "Wake"]
    finally:
        engine.close()


def test_on_a_cpu_servers_start_side_by_side(machine: Machine) -> None:
    machine.starting = 2
    engine = VllmEngine().open(EngineHost.of(machine.policy))
    try:
        assert machine.events() == ["Spawn", "Spawn", "CreateEngine", "CreateEngine", "Ready", "Ready"]
        engine.sleep()
        engine.wake()
        assert machine.events() == []
    finally:
        engine.close()


def test_cached_memory_goes_back_once_nothing_refers_to_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: machine.tell("collect"))
    machine.policy.lineup.release_cached_memory()
    assert machine.events() == [], "nothing on a CPU"
    machine.policy.lineup.device = torch.device("cuda")
    machine.policy.lineup.release_cached_memory()
    assert machine.events() == ["collect", "empty_cache"]


def test_adapters_in_float32_are_refused_on_a_gpu_before_a_server_starts(tmp_path: Path) -> None:
    """vLLM's adapter kernels assert on anything but half precision, half a minute into the start."""
    policy = tiny_policy(tmp_path, dtype="float32")
    policy.lineup.device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"no float32 adapters on CUDA; set model.dtype = 'bfloat16'"):
        VllmEngine().open(EngineHost.of(policy))


@pytest.mark.parametrize(
    ("dtype", "rank", "kind"),
    [
        ("auto", 512, "vllm"),
        ("bfloat16", 8, "vllm"),
        ("bfloat16", 513, "transformers"),
        ("float32", 8, "transformers"),
        ("mixed", 8, "transformers"),
    ],
)
def test_auto_takes_vllm_only_where_it_has_the_precision_and_the_rank(
    monkeypatch: pytest.MonkeyPatch, dtype: Literal["auto", "bfloat16", "float32", "mixed"], rank: int, kind: str
) -> None:
    monkeypatch.setattr("magrpo.engines.vllm_arguments.find_build_obstacle", lambda device_type: "")
    agents, model, lora = [AgentConfig(name="main", model="base")], ModelConfig(dtype=dtype), LoraConfig(rank=rank)
    assert AutoEngine().choose_engine(agents, model, lora, torch.device("cuda")).kind == kind
    whole = [agents[0].model_copy(update={"weights": "full"})]
    assert AutoEngine().choose_engine(whole, ModelConfig(), lora, torch.device("cuda")).kind == "vllm"


def test_mixed_precision_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM has no model\.dtype = 'mixed'; set 'float32'"):
        VllmEngine().open(EngineHost.of(tiny_policy(tmp_path, dtype="mixed")))


@pytest.mark.parametrize(
    ("dtype", "head_dtype"), [("bfloat16", "float32"), ("bfloat16", "auto"), ("float32", "float32")]
)
def test_servers_compute_logits_as_the_update_does(tmp_path: Path, dtype: str, head_dtype: str) -> None:
    policy = tiny_policy(tmp_path, dtype=dtype, head_dtype=head_dtype)
    expected = {"head_dtype": "float32"} if (dtype, head_dtype) == ("bfloat16", "float32") else None
    assert make_arguments(EngineHost.of(policy), ["main"], 1.0).get("hf_overrides") == expected


def test_a_sampler_with_gpus_of_its_own_fills_them(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    policy.lineup.device = torch.device("cuda")
    shared = make_arguments(EngineHost.of(policy), ["main"], 1.0)
    owned = make_arguments(replace(EngineHost.of(policy), gpus=2, owns_gpus=True), ["main"], 1.0)
    assert (shared["tensor_parallel_size"], shared["enable_sleep_mode"]) == (1, True)
    assert (owned["tensor_parallel_size"], owned["enable_sleep_mode"]) == (2, False)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # vLLM imports it to fill its cache
def test_vllm_takes_the_dtype_of_the_head(tmp_path: Path) -> None:
    from vllm.config import ModelConfig as VllmModelConfig  # seconds, and may be missing

    base = str(tiny_base(tmp_path / "base"))
    wide = VllmModelConfig(model=base, dtype="bfloat16", hf_overrides={"head_dtype": "float32"})
    assert wide.head_dtype == torch.float32
    assert VllmModelConfig(model=base, dtype="bfloat16").head_dtype == torch.bfloat16
