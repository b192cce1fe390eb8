"""Pages for a task: their files load, their scripts run, the messages they quote are the project's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import magrpo
from magrpo.config.run import load_config
from tests.process_state import use_modules
from tests.test_docs import DOCUMENTS, code

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMED = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of docs/own-data.md in a folder, which is the current one."""
    page = read_page("own-data")
    rows = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    for name, text in [*NAMED.findall(page), *zip(("problems.jsonl", "puzzles.jsonl"), rows, strict=True)]:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    use_modules(monkeypatch, tmp_path, "my_rows")
    return tmp_path


def test_the_solutions_of_own_data_pass(own_data: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", (own_data / "check_solutions.py").read_text()],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "train double_evens 100% of the tests pass",
        "test initials 100% of the tests pass",
    ]


def test_rows_of_another_form_become_problems(own_data: Path) -> None:
    [words] = re.findall(r"^magrpo evaluate mine\.toml (problems.+)$", read_page("own-data"), re.MULTILINE)
    splits = load_config(own_data / "mine.toml", words.split()).problems.load()
    [longest] = [problem for problems in splits.values() for problem in problems if problem.task_id == "longest"]
    names: dict[str, object] = {}
    exec(longest.prompt + "    return max(x.split(), key=len)\n" + longest.test, names)
    names["check"](names["longest"])  # type: ignore[operator]
    with pytest.raises(AssertionError):
        names["check"](lambda text: text[:3])  # type: ignore[operator]


def test_pages_activate_the_environment_before_they_leave_its_folder() -> None:
    """Because ``.venv/bin/python`` is not there in a folder of one's own."""
    for name, leaves in (("tutorial", "Make an empty folder"), ("own-data", "check_solutions.py")):
        page = read_page(name)
        assert "source .venv/bin/activate" in page[: page.index(leaves)], name
        assert ".venv/bin/" not in page[page.index(leaves) :], name


def test_the_commands_of_the_paper_repeat_its_turns() -> None:
    [table, *_] = read_page("paper").split("\n## ")
    rows = re.findall(r"\| (\d) \| ([^|]+) \|$", table, re.MULTILINE)
    assert len(rows) == 7
    command: list[str] = []
    for turns, cell in rows:
        [words] = (words.split() for words in code(cell))
        command = words[2:] if words[0] == "magrpo" else [*command[:1], *words]
        config = load_config(ROOT / command[0], command[1:])
        assert config.env.num_turns == int(turns), cell
        assert (config.rollout.tree, config.algo.gamma) == ("full", 0.9) or turns == "1", cell


def test_the_configuration_of_own_model_is_one(tmp_path: Path) -> None:
    [(name, text)] = NAMED.findall(read_page("own-model"))
    (tmp_path / name).write_text(text)
    load_config(tmp_path / name)


def test_examples_train_adapters_at_a_rate_for_adapters() -> None:
    """Those of published models; the default rate is for whole models."""
    for page in DOCUMENTS:
        for block in re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            keys = tomllib.loads(block)
            if any("/" in agent["model"] for agent in keys.get("agents", ())):
                assert keys.get("optim", {}).get("lr", 0.0) >= 1e-4, page


def test_the_programs_of_the_readme_fare_as_it_says() -> None:
    """What two agents wrote before and after training, side by side in one block."""
    [block] = re.findall(r"```python\n(# before.+?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    column = block.index("# after")
    [task] = re.findall(r'^\*"(.+?)"\*', (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    config = load_config(ROOT / "pipelines" / "configs" / "embedded.toml")
    [problem] = [problem for problem in config.problems.load()["test"] if task in problem.prompt]
    for start, end in ((0, column), (column, None)):
        lines = [line[start:end].split("# helper")[0].split("# main")[0].rstrip() for line in block.splitlines()]
        [told] = re.findall(r"(\d) of (\d) tests pass", lines[0])
        helper, main = "\n".join(lines[1:]).strip().split("\n\n")
        report = magrpo.price_joint_action(config, problem, {"helper": helper, "main": main}).reports["program"]
        assert (report.tests_passed, report.tests_total) == tuple(map(int, told))


def list_texts() -> set[str]:
    """Every string in the sources, its parts between braces apart; infra/setup.sh as one."""
    texts = {(ROOT / "infra" / "setup.sh").read_text(encoding="utf-8")}
    for package in ("magrpo", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}
    return texts


def test_the_messages_of_troubleshooting_are_those_of_the_sources() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", read_page("troubleshooting"), re.MULTILINE)
    assert len(rows) > 25
    texts = list_texts()
    fragments = {part for row in rows for part in re.split(r"\.\.\.", row) if part.strip()}
    assert [part for part in sorted(fragments) if not any(part in text for text in texts)] == []


def test_the_glossary_is_sorted_into_one_meaning_each() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", read_page("glossary"), re.MULTILINE)[2:]
    words = [word.strip() for term in terms for word in term.split(",")]
    assert len(words) == len(set(words))
    names = {"[[agents]]", "helper", "main", "summary", "elaboration", "runs/RUN_ID", "rollout.group_size"}
    assert code(read_page("glossary")) <= names | {"iac", "maac", "madpo"}


def test_every_picture_is_made_by_docs_pictures() -> None:
    source = (ROOT / "infra" / "docs_pictures.py").read_text(encoding="utf-8")
    made = re.findall(r'^    "(\S+\.png)":', source, re.MULTILINE)
    assert sorted(made) == sorted(path.name for path in DOCS.glob("*.png"))
    documents = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    assert [name for name in made if not re.search(rf"!\[[^\]]+\]\((?:docs/)?{re.escape(name)}\)", documents)] == []
