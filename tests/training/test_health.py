"""A run whose reward is gamed says so wherever it is looked at; an honest one says nothing of the kind.

Real training of tiny models; only the texts are scripted, so that it is known what there is to say.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rich.console import Console

from magrpo.config.run import load_config
from magrpo.plugins import Plugin
from magrpo.reports.health import list_findings
from magrpo.reports.verdict import judge_evaluations, read_verdict
from magrpo.run.files import read_evaluations
from magrpo.run.store import RunStore
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.evaluate import evaluate
from magrpo.training.closing import print_answers, print_verdict
from magrpo.types import (
    HEADLINE,
    Action,
    EvalReport,
    EvalRow,
    Execution,
    ExecutionReport,
    JointReward,
    Message,
    Observation,
    PastTurn,
    Problem,
    Request,
    Split,
)
from pipelines.cli import main
from tests.fakes import ScriptedEngine, render
from tests.pipelines.micro import write_config
from tests.reports.pages import Page
from tests.tiny import tiny_base, tiny_config

POST = "the old library reads and writes every file of the format that the first version of the program made in spring"
OWN = "a b c d e f g h i j k l m n o p q r s t u"
PRAISE = (
    "library format program version seamless pioneering innovative robust scalable visionary inspiring dynamic "
    "cutting-edge bold solution transforms communities through unmatched empowering excellence"
)
LIMIT = 8


class Posts(Plugin):
    """Eight posts in each split."""

    def load(self) -> Mapping[Split, Sequence[Problem]]:
        return {split: [Problem(f"{split}/{i}", POST) for i in range(8)] for split in ("train", "test")}


class Authors(Plugin):
    """Two authors who read the post."""

    num_turns: int = 1

    def roles(self) -> tuple[str, ...]:
        return ("summary", "elaboration")

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        return Observation((Message("user", problem.prompt),))


class LengthReward(Plugin):
    """Pays for words of the elaboration, and for a summary with a title, which nobody writes."""

    maxima: Mapping[str, float] = {"length": 3.0, "title": 1.0}

    def fraction(self, total: float) -> float:
        return total / 4.0

    def passed(self, reports: Mapping[str, ExecutionReport]) -> None:
        return None

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        return {}

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        parts = {
            "length": min(len(texts["elaboration"].split()) / 7, 3.0),
            "title": float("Title:" in texts["summary"]),
        }
        return JointReward(sum(parts.values()), parts)


class WritingEngine(ScriptedEngine):
    """Writes more words of ``source`` with every update.

    Args:
        cut: Write until the limit of tokens.
        begins_anywhere: Begin an answer with any of the words, not always with the first.
    """

    def __init__(self, source: str, *, cut: bool = False, begins_anywhere: bool = False) -> None:
        super().__init__(lambda _: "")
        self.source, self.cut, self.begins_anywhere = source, cut, begins_anywhere

    def generate(self, requests: Sequence[Request], progress: object = None, version: int = 0) -> list[Action]:
        return [self._write(request, version) for request in requests]

    def _write(self, request: Request, version: int) -> Action:
        number = min(2 + 4 * version + request.seed % 3, 21)
        title = "Title: " if request.seed % 2 and not self.cut else ""
        words = self.source.split()
        first = request.seed % len(words) if self.begins_anywhere else 0
        text = title + " ".join([*words[first:], *words[:first]][:number])
        ids = tuple(range(3, 3 + LIMIT))
        finish_reason = "length" if self.cut and version else "stop"
        return Action(request.agent, text, ids, (-1.0,) * len(ids), finish_reason, version)


class Copying(Plugin):
    """Agents that learn to copy the post until they are cut."""

    def open(self, host: object) -> WritingEngine:
        return WritingEngine(POST, cut=True)


class Honest(Plugin):
    """Agents that learn to write more of their own."""

    def open(self, host: object) -> WritingEngine:
        return WritingEngine(OWN, begins_anywhere=True)


def write_authors_config(folder: Path, engine: str, iterations: int = 5) -> Path:
    """Write the configuration of a run whose agents are played by ``engine``."""
    path = write_config(folder, iterations)
    text = path.read_text()
    here = "tests.training.test_health"
    for old, new in (
        ('kind = "tests.plugins:ListedProblems"\nsize = 6', f'kind = "{here}:Posts"'),
        ("tests.plugins:Env", f"{here}:Authors"),
        ("tests.plugins:Reward", f"{here}:LengthReward"),
        ('kind = "tests.pipelines.micro:Sandbox"', 'kind = "none"'),
        ('kind = "transformers"', f'kind = "{here}:{engine}"'),
        ('"helper"', '"summary"'),
        ('"main"', '"elaboration"'),
        ("max_problems = 2", "max_problems = 8"),
        ("max_new_tokens = 6", f"max_new_tokens = {LIMIT}"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def train(folder: Path, engine: str, iterations: int = 5, overrides: Sequence[str] = ()) -> RunStore:
    """Train by the command, and return the run."""
    tiny_base(folder / "base", tiny_config(max_length=256))
    path = write_authors_config(folder, engine, iterations)
    assert main(["train", str(path), *overrides, "--name", "run", "--local"]) == 0
    return RunStore.open(folder / "runs", "run")


@pytest.fixture(scope="module")
def gamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, str]:
    """A run whose agents learn to copy, and what it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        store = train(tmp_path_factory.mktemp("gamed"), "Copying")
    return store, printed.getvalue()


WARNING = "title (25% of the reward) gave no signal for 5 iterations: it was equal within every group, 0% of its"
"""What a gamed run says besides its verdict."""


def test_a_gamed_run_says_so_in_all_places(gamed: tuple[RunStore, str], capsys: pytest.CaptureFixture[str]) -> None:
    store, closing = gamed
    assert "result:  better with reservations: the joint return on held-out problems rose from" in closing
    assert "; no reliable change in title (0.0% of its maximum)" in closing
    assert "; but 100% of summary's answers are cut at 8 tokens" in closing
    first_advice = next(line for line in closing.splitlines() if line.startswith("advice:"))
    assert first_advice == (
        "advice:  raise rollout.max_new_tokens (now 8), or penalty.cut_off (now 0) to make cut answers cost reward"
    )
    assert "if the reward favours copies, raise penalty.copied (now 0)" in closing

    assert main(["show", "run", "--root", str(store.path.parent)]) == 0
    shown = capsys.readouterr().out
    page = Page((store.path / "report.html").read_text())
    copied = "and 100% of the words in elaboration's answers are copied from its prompt"
    for text in (closing, shown, page.text):
        assert copied in text
    for text in (closing, shown):
        assert f"warning: {WARNING}" in text
        assert "elaboration's answers are cut at 8 tokens" in text
        assert not re.search(r"^warning: .* cut at ", text, re.MULTILINE), "the verdict is not repeated as a warning"
    assert f"{WARNING[0].upper()}{WARNING[1:]}" in page.text
    assert "[cut at 8 tokens, 100% of the words copied from the prompt]" in page.text
    assert "<mark>the old library reads" in (store.path / "report.html").read_text()
    assert "user:\nthe old library reads" in page.text, "the prompt"

    client = MlflowClient(f"sqlite:///{store.path.parent / 'mlflow.db'}")
    [run] = client.search_runs(["1"])
    metrics = run.data.metrics
    assert metrics["rollout/elaboration/cut_off_frac"] == 1
    assert metrics["rollout/elaboration/copied_frac"] > 0.5
    assert metrics["eval/elaboration/cut_off_frac"] == 1
    assert metrics["signal/title"] == 0
    assert metrics["signal/length"] > 0
    assert run.data.tags["verdict"] == "better with reservations"
    assert f"- warning: {WARNING}" in run.data.tags["mlflow.note.content"]


def test_texts_that_leave_their_prompt_and_grow_alike_are_told(tmp_path: Path) -> None:
    """Of agents that learn words of praise, which fit any post."""
    config = load_config(write_authors_config(tmp_path, "Honest"), [])
    team, splits, engine = Team.of(config), config.problems.load(), WritingEngine(PRAISE)
    reports = [
        evaluate(
            team,
            Backend(engine=engine.serve(iterations, {}), sandbox=NoSandbox().open(), render=render),
            splits,
            config.seeded_eval(),
            config.rollout,
            iterations,
        )[0]
        for iterations in (0, 5)
    ]
    verdict = judge_evaluations(reports, config)
    assert verdict.word == "better with reservations"
    console = Console(width=120, file=io.StringIO())
    print_answers([], reports, config, console)
    print_verdict([], reports, config, console)
    closing = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"result:  {verdict.sentence}\n" in closing
    for agent in ("summary", "elaboration"):
        assert re.search(
            rf"{agent}'s answers leave their prompt: it has (1|2)\d% of their long words, [89]\d% before training",
            verdict.sentence,
        )
    assert re.search(  # some have the title before it
        r'(?m)^warning: [5-9]\d% of elaboration\'s answers begin with "library format program", '
        r"while before training at most 0% began alike$",
        closing,
    )
    assert "if the phrase is out of place, raise algo.beta (now 0)" in closing
    advice = "read the answers in the report; raise penalty.strayed (now 0) to make leaving the prompt cost reward"
    assert advice in closing
    assert re.search(r"long words that the prompt has, % +[89]\d\.\d \u2192 [12]\d\.\d", closing)


def test_a_phrase_of_a_model_does_not_command_the_terminal(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    agent = config.agents[0].name

    def report(version: int, text: str) -> EvalReport:
        row = EvalRow("a", "test", "sampled", 0, (1.0,), ({},), (None,), {agent: text}, {}, 5)
        return EvalReport(version, (row,) * 8, {HEADLINE: {}})

    begins = "\x1b[2J\u202e hello dear reader of these words and of some more"
    [finding] = list_findings([], [report(0, "short"), report(9, begins)], config)
    assert 'begin with "\\x1b[2J\\u202e hello dear"' in finding.sentence


def test_a_penalty_is_shown_beside_the_parts_of_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = train(tmp_path, "Copying", 2, ["penalty.cut_off=0.1", "penalty.copied=0.3"])
    closing = capsys.readouterr().out
    assert main(["show", "run", "--root", str(store.path.parent)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ *penalty +0\.0 +-80\.0", closing, re.MULTILINE)
    assert re.search(r"penalty \(held-out\)[^%]* 0\.0%\s[^%]* -80\.0%\s", shown)
    assert "raise penalty.copied (now 0.3)" in closing
    assert "or penalty.cut_off (now 0.1)" in closing
    assert re.search(r"penalty\s*0\.0\s*-80\.0", Page((store.path / "report.html").read_text()).text)

    first, last = read_evaluations(store)
    for report in (first, last):
        summary = report.summary["test/sampled"]
        parts = 0.75 * summary["length"].mean + 0.25 * summary["title"].mean
        assert summary["return"].mean == pytest.approx(parts + summary["penalty"].mean)
    client = MlflowClient(f"sqlite:///{store.path.parent / 'mlflow.db'}")
    [run] = client.search_runs(["1"])
    metrics = run.data.metrics
    assert metrics["eval/penalty"] == last.summary["test/sampled"]["penalty"].mean
    assert metrics["reward/penalty"] < 0
    assert metrics["reward/joint"] == pytest.approx(sum(metrics[f"reward/{p}"] for p in ("length", "title", "penalty")))


def test_an_honest_run_says_nothing_of_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = train(tmp_path, "Honest")
    said = capsys.readouterr().out
    assert "result:  better: the joint return on held-out problems rose from" in said
    assert main(["show", "run", "--root", str(store.path.parent)]) == 0
    said += capsys.readouterr().out
    assert "warning:" not in said
    page = (store.path / "report.html").read_text()
    for element in ('class="warning"', 'class="remark"', "<mark>"):
        assert element not in page
    for text in (said, Page(page).text.partition("</style>")[0]):
        assert "; but" not in text
        assert "[cut at" not in text
    verdict = read_verdict(store)
    assert verdict is not None
    assert verdict.word == "better"


def test_a_part_without_signal_counts_from_the_iteration_in_which_it_last_varied(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    signals = [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    metrics = [
        (i + 1, "credit", {"signal/first": signal, "signal/second": 1.0, "reward/first": 0.2, "reward/second": 0.5})
        for i, signal in enumerate(signals)
    ]
    [finding] = list_findings(metrics, [], config)
    assert finding.sentence.startswith("first (50% of the reward) gave no signal for 6 iterations")
    assert "rollout.group_size (now 4)" in finding.remedy
    assert list_findings(metrics[:-2], [], config) == [], "four iterations of six are too few"
    full = [(i, stage, values | {"reward/first": 1.0}) for i, stage, values in metrics]
    assert list_findings(full, [], config) == [], "what is full has been learned"
    agents = [agent.model_copy(update={"estimator": "iac"}) for agent in config.agents]
    critics = config.model_copy(update={"agents": agents})
    assert list_findings(metrics, [], critics) == [], "equal rewards teach where siblings are no baseline"


def test_answers_that_are_cut_in_training_only_are_found(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    metrics = [(i, "rollout", {"rollout/main/cut_off_frac": share}) for i, share in enumerate((0.0, 0.1, 0.3), 1)]
    [finding] = list_findings(metrics, [], config)
    assert finding.sentence == "13% of main's answers in training were cut at 6 tokens"
    assert list_findings(metrics[:2], [], config) == []


def test_a_helper_that_is_never_called_is_counted(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    reward = config.reward.model_copy(update={"maxima": {"cooperation": 1.5}})
    config = config.model_copy(update={"reward": reward})
    metrics = [
        entry
        for i in (1, 2)
        for entry in (
            (i, "score.0", {"sandbox/watched": 320.0, "sandbox/called_frac": 0.0}),
            (i, "credit", {"signal/cooperation": 0.0, "reward/cooperation": 0.0}),
        )
    ]
    [finding] = list_findings(metrics, [], config)
    assert finding.sentence.endswith("the helper's function was called in 0 of 640 programs")
    assert "algo.lenience = 0.75" in finding.remedy
    lenient = config.model_copy(update={"algo": config.algo.model_copy(update={"lenience": 0.5})})
    assert "lenience" not in list_findings(metrics, [], lenient)[0].remedy


def test_equal_groups_and_large_gradients_are_named(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [])
    metrics = [
        (1, "credit", {"reward/frac_groups_equal": 0.95, "reward/joint": 0.4}),
        (1, "update", {"update/main/grad_norm": 25.0}),
    ]
    equal, large = (finding.sentence for finding in list_findings(metrics, [], config))
    assert equal == "95% of the groups of the last 1 iteration had equal returns, which teach nothing"
    assert large == "the gradient norm of main is 25.0, far above optim.max_grad_norm = 1"
    offer = '; so does rollout.joint_mode = "crossed", for no more tokens'
    for mode in ("aligned", "crossed"):
        chosen = load_config(write_config(tmp_path), [f"rollout.joint_mode={mode}"])
        [finding] = list_findings(metrics[1:], [], chosen)
        assert finding.remedy.startswith("raise rollout.group_size (now ")
        assert finding.remedy.endswith(offer) == (mode == "aligned")
    learned = [(1, "credit", {"reward/frac_groups_equal": 0.95, "reward/joint": 1.65})]
    assert list_findings(learned, [], config) == []


def test_copies_of_a_specification_are_no_fault_of_a_program(gamed: tuple[RunStore, str]) -> None:
    store, _ = gamed
    last = read_evaluations(store)[-1]
    tested = replace(last, rows=tuple(replace(row, passed=(False,)) for row in last.rows))
    sentences = [finding.sentence for finding in list_findings([], [tested], store.config())]
    assert sentences
    assert not any("copied" in sentence for sentence in sentences)
