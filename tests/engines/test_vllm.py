"""The vLLM engine's process: nothing survives the trainer, and a dead server is one clear error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines import EngineError
from magrpo.engines.auto import AutoEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.errors import ConfigError
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.process.children import list_family
from magrpo.types import Request, SamplingParams
from tests.processes import assert_all_end, find_running
from tests.tiny import perturb, tiny_base

ASKED = [Request("main", (5, 6, 7), SamplingParams(max_new_tokens=100), seed) for seed in range(64)]
# A trainer that opens an engine, says so, and generates until it is killed.
TRAINER = """
import sys
from pathlib import Path
from tests.engines.test_vllm import ASKED, open_policy
from magrpo.model.host import EngineHost
from magrpo.engines.vllm import VllmEngine
engine = VllmEngine().open(EngineHost.of(open_policy(Path(sys.argv[1])))).serve(0, {})
engine.generate(ASKED[:1])
print("generating", flush=True)
while True:
    engine.generate(ASKED)
"""


def open_policy(folder: Path) -> Policy:
    base = str(folder / "base" if (folder / "base").exists() else tiny_base(folder / "base"))
    agents = [AgentConfig(name="main", role="main", model=base)]
    return Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)


@pytest.mark.slow
@pytest.mark.vllm
def test_nothing_survives_kill_9_of_the_trainer(tmp_path: Path) -> None:
    tiny_base(tmp_path / "base")
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "generating\n"
    family = list_family(trainer.pid)
    assert find_running(family, "magrpo.engines.vllm_server")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert_all_end(family)


@pytest.mark.slow
@pytest.mark.vllm
def test_supports_reach_their_tokens_when_requests_are_preempted_and_resumed(tmp_path: Path) -> None:
    """32 requests grow to 4 blocks of 32 tokens each, in a cache of about 32 blocks."""
    policy = open_policy(tmp_path)
    sampling = SamplingParams(0.8, top_p=0.9, max_new_tokens=120, keep_support=True)
    asked = [Request("main", (5, 6, 7), sampling, seed) for seed in range(32)]
    engine = VllmEngine(cpu_cache_gib=0.001).open(EngineHost.of(policy))
    actions = engine.serve(0, {}).generate(asked)
    engine.close()
    assert sum(len(action.token_ids) for action in actions) > 2 * 1024
    assert len({action.token_ids for action in actions}) == len(actions)
    for action in actions:
        with policy.active("main") as model, torch.no_grad():
            logits = model(input_ids=torch.tensor([[5, 6, 7, *action.token_ids]])).logits[0, 2:-1] / 0.8
        rows = zip(logits, action.token_ids, action.support, action.sampling_logps, strict=True)
        for row, token, support, logp in rows:
            assert logp == pytest.approx(float(row[token] - row[list(support)].logsumexp(-1)), abs=1e-4)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_that_dies_in_the_middle_is_asked_again_for_what_is_missing_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With trained adapters, which the new server has to take up as well."""
    policy = open_policy(tmp_path)
    engine = VllmEngine(max_batch=8).open(EngineHost.of(policy))
    perturb(policy, seed=1)
    finished: list[int] = []

    def count_and_kill(count: int) -> None:
        finished.append(count)
        if len(finished) == 20:
            [server] = find_running(list_family(os.getpid()), "magrpo.engines.vllm_server")
            server.kill()

    try:
        served = engine.serve(1, policy.save(tmp_path / "weights"))
        whole = served.generate(ASKED)
        again = served.generate(ASKED, count_and_kill)
    finally:
        engine.close()
    assert [action.token_ids for action in again] == [action.token_ids for action in whole]
    assert sum(finished) == len(ASKED)
    assert re.search(r"ended with status 137.*; (\d\d) of 64 completions are done, restarting the server", caplog.text)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_base_that_vllm_cannot_serve_is_one_error(tmp_path: Path) -> None:
    policy = open_policy(tmp_path)
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("LlamaForCausalLM", "NoSuchModel"), encoding="utf-8")
    with pytest.raises(EngineError, match=r"server of main ended with status 1 .*NoSuchModel.*log: "):
        VllmEngine().open(EngineHost.of(policy))


@pytest.mark.usefixtures("cuda_build")
def test_a_build_for_gpus_is_refused_on_a_cpu_before_a_server_starts(tmp_path: Path) -> None:
    """Its server would end with "Device string must not be empty"."""
    with pytest.raises(
        ConfigError,
        match=r"^engine.kind: this vLLM build needs a GPU; make setup GPU=0 in a clone, or use 'transformers'$",
    ):
        VllmEngine().open(EngineHost.of(open_policy(tmp_path)))


def test_without_vllm_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"vLLM is not installed; pip install 'magrpo\[vllm\]'"):
        VllmEngine().open(EngineHost.of(policy))
    lineup = policy.lineup
    assert (
        AutoEngine().choose_engine(lineup.configs, lineup.model, lineup.lora, torch.device("cuda")).kind
        == "transformers"
    )
