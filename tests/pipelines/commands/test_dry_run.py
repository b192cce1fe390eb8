"""The plan of a run: its counts against a run that was made, its sizes against models that were loaded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.library import run_iteration, train_run
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.planning.place_check import check_place
from magrpo.planning.sizes import (
    ACTIVATIONS_OF,
    GRADIENTS,
    KV_CACHE,
    RECORD_BYTES,
    SAMPLING,
    SECOND_POLICY,
    SUPPORT_BYTES,
    UPDATING,
    estimate_disk,
    estimate_memory,
    estimate_work,
    read_base_model,
    sum_held_at_once,
)
from magrpo.problems.rows import check_source
from magrpo.run.files import checkpoint_weights
from magrpo.run.steps import Step
from magrpo.run.store import RunStore, read_records
from magrpo.types import RolloutGroup, Turn
from pipelines.arguments import locate_config
from pipelines.cli import main
from pipelines.commands.dry_run import show_plan
from pipelines.commands.first_prompts import shorten_middle
from pipelines.commands.inputs import check_inputs
from pipelines.commands.train import check_given_place
from tests.memory_tracker import MemoryTracker
from tests.pipelines.micro import open_stages
from tests.tiny import tiny_base, tiny_config
from tests.training.test_resume import Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With a finished run, ``whole``."""
    runs = Runs(tmp_path_factory.mktemp("plan"))
    runs.train_unrecorded("whole")
    return runs


def config(runs: Runs, *overrides: str) -> RunConfig:
    path, *given = runs.config
    return load_config(path, [*given, *overrides])


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_command_prints_a_plan_and_writes_nothing(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(runs.root)
    root = tmp_path / "runs"
    assert main(["train", *runs.config, f"root={root}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not root.exists()
    assert "stages   13, in this order\n          0  prepare start evaluate\n" in said
    assert "          2  rollout.0 score.0 credit update evaluate report\n" in said
    assert "reused   none: a new run" in said
    assert "engine   transformers, on " in said
    for line in ("lora.rank = 2 (default 16)", "optim.lr = 0.01 (default 2e-05)", "agents.1.name = main"):
        assert f"\n  {line}\n" in said
    assert "algo.gamma" not in said, "which has its default"
    assert said.endswith("nothing was trained or written\n")

    assert main(["resume", "whole", "--root", str(runs.root), "--dry-run"]) == 0
    assert "reused   13 of 13 stages; none is left to run" in capsys.readouterr().out
    assert files(runs.root) == before


def test_the_plan_of_going_on_from_a_stage(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore.open(runs.root, "whole")
    before = files(runs.root)
    assert show_plan(store.config(), store, "update:2") == 0
    said = capsys.readouterr().out
    assert "4 committed stages, from update:1 on, would be set aside" in said
    assert "reused   9 of 13 stages; the first to run is update:1" in said
    assert files(runs.root) == before


def test_the_plan_tells_the_disk_that_the_run_takes(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    long = ("train.num_iterations=40", "eval.every=20")
    assert show_plan(config(runs, *long), None, None) == 0
    said = capsys.readouterr().out
    assert f" for the whole run; 1.0 MiB free in {runs.root}\n" in said
    assert "  weights of 41 checkpoints\n" in said
    assert "  optimizer states of 2\n" in said
    assert '             with train.keep_weights = "evaluated": about ' in said
    assert "more than is free: the run would stop; you could resume it after freeing space\n" in said
    disk.free = 2**40
    assert show_plan(config(runs, *long, "train.keep_weights=evaluated"), None, None) == 0
    said = capsys.readouterr().out
    assert "  weights of 3 checkpoints\n" in said
    assert "more than is free" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_run_for_a_gpu_is_planned_without_one_and_refused(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert show_plan(config(runs, "model.device=cuda"), None, None) == 0
    said = capsys.readouterr().out
    assert "engine   transformers, on cuda in bfloat16\n" in said
    assert "PyTorch sees no CUDA device here: the run would be refused\n" in said
    for example in ("humaneval", "tldr"):
        path = Path(__file__).parents[3] / "pipelines" / "configs" / f"{example}.toml"
        assert main(["train", str(path), "--root", str(tmp_path / "runs")]) == 2
        refusal = 'magrpo: model.device = "cuda": PyTorch sees no CUDA device; use "cpu" or "auto"\n'
        assert capsys.readouterr().err == refusal
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_run_for_a_gpu_is_refused_before_its_stages_are_set_aside(runs: Runs) -> None:
    store, needs_gpu = RunStore.open(runs.root, "whole"), config(runs, "model.device=cuda")
    check_given_place(needs_gpu, None, store)
    check_given_place(needs_gpu, None, store, "report")
    for stage in ("update", "evaluate"):
        with pytest.raises(
            ConfigError, match=r"sees no CUDA device; .*: this needs a new run; or use a machine that has"
        ):
            check_given_place(needs_gpu, None, store, stage)
    elsewhere = Place.model_validate({"address": "head:6379", "samplers": {"count": 1}, "ranks": {"count": 1}})
    check_given_place(needs_gpu, elsewhere, store, "update")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_loss_in_triton_is_refused_on_a_cpu_before_anything_is_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every way to start a run, and to plan one."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    root, kernel = tmp_path / "runs", "algo.kernel=triton"
    study = tmp_path / "kernels.toml"
    study.write_text(
        "config = 'embedded'\noutcome = 'final_return'\ntokens = 9\nseeds = [0]\nset = ['optim.schedule=constant']\n"
        f"[[arms]]\nname = 'plain'\n[[arms]]\nname = 'fused'\nset = ['{kernel}']\n"
    )
    for command in (["train", "embedded", kernel], ["study", str(study)]):
        for options in ([], ["--dry-run"]):
            assert main([*command, *options, "--root", str(root)]) == 2
            assert 'magrpo: algo.kernel = "triton" needs a CUDA device: use a machine' in capsys.readouterr().err
    triton = load_config(locate_config("embedded"), [kernel, f"root={root}"])
    for start in (train_run, run_iteration):
        with pytest.raises(ConfigError, match="triton"):
            start(triton)
    with pytest.raises(ConfigError, match="triton"):
        check_given_place(triton, None)
    assert list(root.iterdir()) == []
    check_place(load_config(locate_config("embedded"), [kernel, "train.num_iterations=0"]), Place())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_place(triton, Place())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_run_without_updates_left_needs_no_triton(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the place refuses comes first, because its remedy would help."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    store, triton = RunStore.open(runs.root, "whole"), config(runs, "algo.kernel=triton", "model.device=auto")
    assert show_plan(triton, store, None) == 0
    check_given_place(triton, None, store)
    check_given_place(triton, None, store, "report")
    for options in ((store, "update"), (None, None)):
        with pytest.raises(ConfigError, match=r"use a machine that has one, .*or start a new run"):
            check_given_place(triton, None, *options)
    cluster = Place.model_validate({"address": "head:6379", "samplers": {"count": 1}, "ranks": {"count": 1}})
    with pytest.raises(ConfigError, match=r'start a new run with model\.device = "cuda"') as refusal:
        check_place(triton, cluster)
    assert "triton" not in str(refusal.value)


def test_counts_are_those_of_a_run(runs: Runs) -> None:
    store, work = RunStore.open(runs.root, "whole"), estimate_work(config(runs))
    groups = read_records(store.path / "stages/00001/rollout.0/groups.jsonl.gz", RolloutGroup[Turn])
    assert work.completions == sum(len(members) for group in groups for members in group.actions.values())
    assert work.joint_actions == sum(len(group.turns) for group in groups)
    assert work.tokens == work.completions * 6
    assert work.programs is None, "a reward from elsewhere does not say"


def test_counts_of_several_turns_and_crossed_actions(runs: Runs) -> None:
    two = estimate_work(config(runs, "env.num_turns=2", "rollout.tree=full", "rollout.joint_mode=crossed"))
    # 2 problems; 4 completions of 2 agents and 16 joint actions a node
    assert (two.completions, two.joint_actions) == ((2 + 32) * 4 * 2, (2 + 32) * 16)
    probed = estimate_work(
        config(runs, "rollout.joint_mode=crossed", "rollout.probe_size=2", "rollout.max_draws=3")
    )  # 4 further problems with 2 completions of 2 agents, and 4 joint actions
    assert (probed.completions, probed.joint_actions) == (2 * 4 * 2 + 4 * 2 * 2, 2 * 16 + 4 * 4)
    chains = estimate_work(config(runs, "env.num_turns=3", "rollout.joint_mode=crossed"))
    assert (chains.completions, chains.joint_actions) == (2 * 4 * 2 + 2 * (2 * 16 * 2), 3 * 2 * 16)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_sizes_are_those_of_loaded_models(runs: Runs, weights: str) -> None:
    resolved = config(runs, f"agents.0.weights={weights}", "model.device=cpu")
    policy = Policy.open(resolved.agents, resolved.model, resolved.lora, 0)
    trained = {name: sum(p.numel() for p in policy.parameters(name).values()) for name in policy.agents}
    with policy.active("main") as model:
        frozen = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
    sizes = estimate_memory(resolved, 4, None)
    assert sizes["optimizer"] == 8 * sum(trained.values())
    # Agents with adapters are computed side by side on a CPU, one with a full copy alone.
    at_once = min(len(trained), torch.get_num_threads()) if weights == "lora" else 1
    assert sizes[GRADIENTS] == 4 * sum(sorted(trained.values())[-at_once:])
    lanes = config(runs, f"agents.0.weights={weights}", "model.device=cpu", "optim.lanes=4")
    assert estimate_memory(lanes, 4, None)[GRADIENTS] == (2 + 2) * sizes[GRADIENTS], "a tree of two levels"
    assert sizes["adapters"] == 4 * sum(n for name, n in trained.items() if policy.lineup.weights(name) == "lora")
    assert sizes.get("full copies", 0) == 4 * (trained["helper"] if weights == "full" else 0)
    assert sizes["frozen parameters"] == 4 * frozen
    assert "KV cache of completions" not in sizes
    assert estimate_memory(resolved, 4, 256)["KV cache of completions"] > 0


def test_the_cache_holds_each_prompt_once_where_siblings_share_it(runs: Runs) -> None:
    rows = 3 * (1 + 4)  # of an agent in an evaluation, which is larger than an iteration
    sampled = ["eval.max_problems=3", "eval.num_samples=4", "rollout.max_new_tokens=6", "model.device=cpu"]
    resolved = config(runs, *sampled)
    assert estimate_work(resolved).completions / 2 < rows
    size = read_base_model(resolved.agents[0], resolved)
    assert size.has_own_steps
    of_two_agents = 2 * size.token_cache * 4
    assert estimate_memory(resolved, 4, 256, 50)[KV_CACHE] == of_two_agents * (3 * 50 + rows * 6)
    assert estimate_memory(resolved, 4, 4, 50)[KV_CACHE] == of_two_agents * (50 + 4 * 6), "a group of an iteration"
    in_half = estimate_memory(resolved, 2, 256, 50)[KV_CACHE]
    assert in_half == of_two_agents / 2 * rows * (50 + 6), "a copy each in half precision"
    on_gpu = config(runs, *sampled, "model.device=cuda")
    assert estimate_memory(on_gpu, 4, 256, 50)[KV_CACHE] == of_two_agents / 2 * rows * (50 + 6), "a copy each"
    two_turns = config(runs, *sampled, "env.num_turns=2")
    rows = estimate_work(two_turns).completions // 2  # of an agent in an iteration, which is larger now
    assert estimate_memory(two_turns, 4, 256, 50)[KV_CACHE] == of_two_agents * rows * (50 + 6), "a history each"


def test_samplers_hold_what_the_runs_own_process_does_not(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place.model_validate({"samplers": {"count": 2}})
    assert show_plan(config(runs, "engine.kind=transformers"), None, None, place) == 0
    said = capsys.readouterr().out
    assert "on each sampler: a policy for sampling, and its KV cache\n" in said
    assert "KV cache of completions" not in said


def test_recorded_support_takes_disk(runs: Runs) -> None:
    plain, recorded = (
        estimate_disk(config(runs, "rollout.top_k=20", f"rollout.keep_support={keeps}"), copies=False)
        for keeps in ("false", "true")
    )
    records = "completions, rewards and samples"
    assert recorded[records] == plain[records] * (RECORD_BYTES + 20 * SUPPORT_BYTES) / RECORD_BYTES


def test_a_lag_adds_a_policy_that_samples(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    lagged = config(runs, "train.lag=1", "algo.importance_cap=2", "optim.lanes=2")
    one, two = estimate_memory(config(runs, "optim.lanes=2"), 4, 256), estimate_memory(lagged, 4, 256)
    assert one[ACTIVATIONS_OF] < estimate_memory(config(runs), 4, 256)[ACTIVATIONS_OF], (
        "a lane has a share of the tokens"
    )
    assert two.pop(SECOND_POLICY) == one["frozen parameters"] + one["adapters"]
    assert one == two
    assert SECOND_POLICY not in estimate_memory(lagged, 4, None), "servers have their own"
    assert show_plan(lagged, None, None, Place.model_validate({"ranks": {"count": 2}})) == 0
    said = capsys.readouterr().out
    assert " on each rank at once, without libraries\n" in said
    assert "in the run's own process: a policy for sampling" in said


def test_sampling_and_updating_share_their_memory_unless_they_overlap(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = estimate_memory(config(runs, "model.device=cpu", "engine.kind=transformers"), 4, 256)
    sampling, updating = (sum(sizes.get(purpose, 0.0) for purpose in purposes) for purposes in (SAMPLING, UPDATING))
    assert 0 < sampling != updating > 0
    everything = sum(sizes.values())
    assert sum_held_at_once(sizes, overlapping=True) == everything
    assert sum_held_at_once(sizes, overlapping=False) == everything - min(sampling, updating)
    assert show_plan(config(runs, "model.device=cpu", "engine.kind=transformers"), None, None) == 0
    said = capsys.readouterr().out
    assert re.search(r"^memory   about [0-9.]+ .iB at once, without libraries$", said, re.M)
    assert "  KV cache of completions, while the engine samples\n" in said
    assert "  logits, in an update\n" in said


def test_a_warm_up_longer_than_the_run_is_in_the_plan(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(config(runs, "optim.lr=0.01", "optim.warmup_iterations=4", "train.num_iterations=2"), None, None)
    said = capsys.readouterr().out
    assert (
        "\nwarning  optim.warmup_iterations = 4 exceeds train.num_iterations = 2: the learning rate ends at 0.005"
        in said
    )
    show_plan(config(runs, "optim.warmup_iterations=4", "train.num_iterations=4"), None, None)
    assert "warm-up" not in capsys.readouterr().out


def test_missing_files_are_found_by_the_plan(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent 'helper': start_from = .*nowhere: no such folder"):
        check_inputs(config(runs, f"agents.0.start_from={tmp_path / 'nowhere'}"), for_plan=True)
    trained = checkpoint_weights(RunStore.open(runs.root, "whole"), 2) / "helper"
    with pytest.raises(ConfigError, match=r"helper/adapter_config.json: .* set lora.alpha = 4.0 \(now 5.0\)"):
        check_inputs(config(runs, f"agents.0.start_from={trained}", "lora.alpha=5"), for_plan=True)
    for problems, name in (("mbpp", "no-problems.jsonl"), ("tldr", "no-texts.json")):
        given = [f"problems.kind={problems}", f"problems.source={tmp_path / name}"]
        with pytest.raises(ConfigError, match=rf"{name}: no such file; give a "):
            check_inputs(load_config(locate_config("tldr" if problems == "tldr" else "mbpp"), given), for_plan=True)


CHAT = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<reply>"
PLAIN = "model.chat_template=none"


def test_the_plan_shows_problems_and_the_prompt_of_each_agent(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base(tmp_path / "chat", tiny_config(max_length=4096), chat_template=CHAT)
    models = (f"agents.0.model={base}", f"agents.1.model={base}")
    assert show_plan(config(runs, *models), None, None) == 0
    said = capsys.readouterr().out
    planned = config(runs, *models)
    lineup = Lineup.open(planned.agents, planned.model, planned.lora)
    problems = planned.problems.load()
    seen = [planned.env.observe(p, role, (), role) for m in problems.values() for p in m for role in ("helper", "main")]
    longest = max(len(lineup.render("helper", prompt)) for prompt in seen)
    sizes = ", ".join(f"{len(members)} {split}" for split, members in problems.items())
    assert f"\nproblems {sizes}\n         the longest prompt has {longest} tokens\n" in said
    first = problems["train"][0]
    for agent in ("helper", "main"):
        ids = lineup.render(agent, planned.env.observe(first, agent, (), agent))
        text = lineup.tokenizer(agent).decode(list(ids))
        assert "<reply>" in text
        lines = "".join(f"  | {line}".rstrip() + "\n" for line in text.split("\n"))
        assert f"\nprompt   of {agent}, for {first.task_id}: {len(ids)} tokens\n{lines}" in said
    assert "\nwarning " not in said
    assert show_plan(config(runs, *models, PLAIN), None, None) == 0
    said = capsys.readouterr().out
    assert f'\nwarning  model.chat_template = "none": prompts do not use the chat template of {base}, and a ' in said
    assert "<reply>" not in said
    assert show_plan(config(runs, PLAIN), None, None) == 0
    assert "\nwarning " not in capsys.readouterr().out, "a base without a template"


def test_a_long_prompt_is_shown_without_its_middle() -> None:
    assert shorten_middle("x" * 1200) == "x" * 1200
    assert shorten_middle("a" * 700 + "b" * 700) == "a" * 600 + " ... (200 characters omitted) ... " + "b" * 600


def test_a_run_warns_of_a_chat_template_that_is_not_used(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base(tmp_path / "chat", tiny_config(max_length=64), chat_template=CHAT)
    unused = config(runs, f"agents.0.model={base}", f"agents.1.model={base}", f"root={tmp_path}", PLAIN)
    with open_stages(unused, RunStore.create(unused), MemoryTracker()) as stages:
        stages.run_step(Step("prepare", 0), [])
    said = " ".join(capsys.readouterr().out.split())
    assert 'warning: model.chat_template = "none": prompts do not use the chat template of' in said
    assert "model.chat_template=auto" in said


@pytest.mark.parametrize("source", ["openai/openai_humaneval", "owner/name:file.jsonl"])
def test_a_hub_id_is_not_asked_for(source: str) -> None:
    check_source(source)


def test_a_model_that_is_not_there(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="agent 'helper': model = '/nowhere/at-all': no such folder"):
        estimate_memory(config(runs, "agents.0.model=/nowhere/at-all"), 4, None)
