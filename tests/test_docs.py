"""The documents: links, anchors, paths and names exist, commands and overrides are valid, pages are complete.

``python -m tests.test_docs``, part of ``make docs``, writes docs/configuration.md and the schema of configurations.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from magrpo.config.run import RunConfig, load_config
from magrpo.process.environment import QUIET
from magrpo.sandboxes.levels import ALLOW_NONE
from pipelines import cli
from pipelines.arguments import CONFIGS
from pipelines.commands.config_help import TITLE, format_keys
from tests.pipelines.micro import blank_pictures, run_locally, write_config
from tests.schema import format_schema
from tests.tracking.test_system import MACHINE

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("infra/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def read_prose(path: Path) -> str:
    """A document without its blocks of code."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = [target for target in LINK.findall(read_prose(path)) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_page_meet_a_heading(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", read_prose(path)):
        page = (path.parent / target if target else path).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_that_sources_name_exist() -> None:
    sources = [ROOT / "infra" / "setup.sh", ROOT / "Makefile"]
    sources += [path for folder in ("magrpo", "magrpo_kernels", "pipelines") for path in ROOT.glob(f"{folder}/**/*.py")]
    named = {name for path in sources for name in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8"))}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_readme_and_site_list_every_page() -> None:
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")}
    assert pages - set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == set()
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in sorted(pages) if f": {Path(page).name}\n" not in navigation] == []


ROOMS = "magrpo|magrpo_kernels|pipelines|tests|infra|requirements|docs"
EXAMPLES = {
    "magrpo/problems/my_problems.py",
    "magrpo.problems.my_problems:TimesPlus",
    "infra/compose.override.yaml",
    "magrpo.env",
}
"""For a reader to write."""


def find_definition(dotted: str) -> bool:
    """Whether ``package.module`` exists, or ``package.module.name`` with the name at the top of the module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        file = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)
        if file is not None:
            names = parts[end:]
            text = file.read_text(encoding="utf-8")
            return not names or any(re.search(form.format(names[0]), text, re.MULTILINE) for form in DEFINED)
    return False


DEFINED = (r"^(?:async )?(?:def|class) {}\b", r"^{}\b.*=", r"^from .* import (?:.*\b)?{}\b", r"^    {},$")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_names_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # it may name what has been removed
        return
    text = path.read_text(encoding="utf-8")
    inline = code(read_prose(path)) - EXAMPLES
    paths = {match[0].rstrip(".") for word in inline for match in re.finditer(rf"(?:{ROOMS})/[\w./-]+", word)}
    assert [name for name in sorted(paths - EXAMPLES) if not (ROOT / name).exists()] == []
    entries = [re.fullmatch(rf"((?:{ROOMS})/[\w/]+)\.py:(\w+)", word) for word in text.replace("`", " ").split()]
    names = {f"{entry[1].replace('/', '.')}.{entry[2]}" for entry in entries if entry}
    names |= {word for word in inline if re.fullmatch(r"(?:magrpo|magrpo_kernels|pipelines|tests)(?:\.\w+)+", word)}
    names |= set(re.findall(r"python -m ((?:magrpo|tests|pipelines)[\w.]*)", text))
    for module, imported in re.findall(r"^from ((?:magrpo|pipelines)[\w.]*) import (.+)$", text, re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    assert [name for name in sorted(names) if not find_definition(name) and name not in TAGS] == []


TAGS = {"magrpo.iteration", "magrpo.split", "magrpo.mode"} | {
    tag
    for path in [*ROOT.glob("magrpo/**/*.py"), *ROOT.glob("pipelines/**/*.py")]
    for tag in re.findall(r'"(magrpo\.\w+)"', path.read_text("utf-8"))
}
"""Tags of MLflow, which look like names of modules."""


def test_the_configuration_in_the_readme_is_one(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example)
    load_config(path)


CONFIGURATION = ROOT / "docs" / "configuration.md"


def configuration_page() -> str:
    """The text that ``docs/configuration.md`` must have, with the keys as the code defines them now."""
    return f"""# Configuration

`make docs` writes this page from the classes that define the keys. `magrpo config show` prints the same text, one
section at a time.

A run is configured by one TOML file; [`pipelines/configs/`](../pipelines/configs) has examples. `section.key=value` on
the command line changes one value. Name an agent by its number or its name: `agents.0.model=...`,
`agents.main.model=...`. A section with a `kind` is a plug-in: `kind` chooses the plug-in, and the other keys are its
fields.

```
{format_keys(TITLE, RunConfig)}
```
"""


def test_configuration_page_is_current() -> None:
    assert CONFIGURATION.read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


def test_the_schema_of_configurations_is_current() -> None:
    assert (CONFIGS / "schema.json").read_text(encoding="utf-8") == format_schema(), "run `make docs`"


METRICS = ROOT / "docs" / "metrics.md"
EVERY_KEY = ["env.num_turns=2", "rollout.tree=full", "rollout.joint_mode=crossed"]
EVERY_KEY += ["algo.update_epochs=2", "algo.beta=0.1", "eval.num_samples=10", "agents.1.lr=0.02"]
EVERY_KEY += ["train.lag=1", "algo.importance_cap=2", "penalty.cut_off=0.1", "reward.kind=tests.plugins:WatchingReward"]
"""A run with these values reports every key there is, but for those of the runs below."""
CRITICS = ["agents.0.estimator=iac", "agents.1.estimator=maac"]
PREFERENCES = ["algo.loss=madpo", "algo.update_epochs=2"]
PROBES = ["rollout.probe_size=2"]
PROGRAM = 'env={kind = "program", run = "tests.gateway.programs:ask_both", writes = ["helper", "main"]}'


def metric_keys() -> list[str]:
    """The keys in the first column of the tables of docs/metrics.md."""
    return re.findall(r"`([^`]+)`", "\n".join(FIRST_CELL.findall(METRICS.read_text(encoding="utf-8"))))


def test_metrics_page_lists_the_keys_of_a_run(tmp_path: Path) -> None:
    path = write_config(tmp_path, iterations=1)
    config = load_config(path, EVERY_KEY)
    committed: set[str] = set()
    for overrides in (EVERY_KEY, [PROGRAM], CRITICS, PREFERENCES, PROBES):
        with blank_pictures():
            store, tracker, _ = run_locally(load_config(path, overrides))
        keys = {key for _, _, metrics in store.stage_metrics() for key in metrics}
        if overrides is EVERY_KEY:
            assert {key for _, metrics in tracker.history for key in metrics} <= keys
        committed |= keys
    values = {
        "agent": [agent.name for agent in config.agents],
        "part": list(config.reward.maxima),
        "split": ["train", "test", "ood"],
        "mode": ["sampled", "greedy"],
        "turn": ["1", "2"],
        "k": ["1", "3", "5", "10"],
    }
    listed = [key for key in metric_keys() if not key.startswith("system/")]
    assert len(listed) == len(set(listed)), "a key is listed twice"
    patterns = {key: re.sub(r"<(\w+)>", lambda name: f"({'|'.join(values[name[1]])})", key) for key in listed}
    assert [key for key in committed if not any(re.fullmatch(p, key) for p in patterns.values())] == []
    assert [key for key, p in patterns.items() if not any(re.fullmatch(p, k) for k in committed)] == []


def test_metrics_page_lists_the_samples_of_the_machine() -> None:
    listed = [key for key in metric_keys() if key.startswith("system/")]
    memory, power = (
        ("memory_usage_megabytes", "memory_usage_percentage"),
        ("power_usage_watts", "power_usage_percentage"),
    )
    gpu = [f"system/gpu_<i>_{key}" for key in (*memory, *power, "utilization_percentage")]
    assert {*MACHINE, *gpu} == set(listed)


CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
FIRST_CELL = re.compile(r"^\| (.+?) \|", re.MULTILINE)


def commands(app: App, name: str) -> Iterator[tuple[str, App]]:
    """Every command that does something, with its full name."""
    if app.default_command is not None:
        yield name, app
    for word in app:
        if not word.startswith("-"):
            yield from commands(app[word], f"{name} {word}")


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def cells(text: str) -> set[str]:
    """What is in backticks in the first column of the tables of a text."""
    return code("\n".join(FIRST_CELL.findall(text)))


def test_cli_page_has_every_command_and_argument() -> None:
    sections = dict(re.findall(r"^## (magrpo .+?)\n(.*?)(?=^## )", CLI, re.MULTILINE | re.DOTALL))
    parser = dict(commands(cli.app, "magrpo"))
    assert sections.keys() == parser.keys()
    assert {cell for cell in cells(CLI[: CLI.index("## magrpo")]) if cell.startswith("magrpo ")} == parser.keys()
    for name, app in parser.items():
        arguments = {argument.names[0] for argument in app.assemble_argument_collection()}
        usage = sections[name].split("```")[1]
        words = r"--[a-z-]+|(?<=[ \[])(?:CONFIG|FILE|OVERRIDES|PROBLEM|RUN|TOPIC)(?= |\.|\])"
        assert set(re.findall(words, usage)) >= arguments, name
        assert set(re.findall(r"--[a-z-]+", usage)) <= arguments, name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_ones(path: Path) -> None:
    """Those in blocks of code parse, those in a sentence begin with a command there is."""
    text = path.read_text(encoding="utf-8")
    prose = BLOCK.sub("", text)
    blocks = "\n".join(BLOCK.findall(text))
    for line in re.findall(r"^(?:\$ )?magrpo ([^[\n]+)$", blocks, re.MULTILINE):
        cli.app.parse_args(shlex.split(line, comments=True), exit_on_error=False, print_error=False)
    known = {name.split()[1] for name, _ in commands(cli.app, "magrpo")}
    named = {word for inline in code(prose) for word in re.findall(r"^(?:\.venv/bin/)?magrpo ([a-z][a-z-]*)", inline)}
    assert named <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_overrides_are_ones(path: Path) -> None:
    """Of every configuration that ships and is trained in a block of code."""
    blocks = "\n".join(BLOCK.findall(path.read_text(encoding="utf-8")))
    for line in re.findall(r"^magrpo train (pipelines/configs/[^[\n]+)$", blocks, re.MULTILINE):
        config, *words = shlex.split(line, comments=True)
        load_config(ROOT / config, [word for word in words if re.match(r"[a-z_]+\.[\w.]+=[^,]*$", word)])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_servers_are_started_without_reports_of_usage(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if "prefect server start" in line:
            assert "PREFECT_SERVER_ANALYTICS_ENABLED=false" in line, line
        if "mlflow ui" in line or "mlflow server" in line:
            assert "DO_NOT_TRACK=true" in line, line


def test_cli_page_has_every_environment_variable() -> None:
    read = {ALLOW_NONE, *QUIET}
    sources = [*ROOT.glob("magrpo/**/*.py"), *ROOT.glob("pipelines/**/*.py")]
    for path in (path for path in sources if "examples" not in path.parts):  # whose variables are their own
        read |= set(re.findall(r"environ(?:\.\w+)?[\[(]\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert cells(CLI[CLI.index("## Environment variables") :]) == read


def test_cli_page_shows_what_score_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems, completions, report = re.findall(r"```json\n(.*?)```", CLI, re.DOTALL)
    [command] = re.findall(r"^magrpo (score --problems problems.jsonl .*)$", CLI, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(problems)
    Path("completions.jsonl").write_text(completions)
    assert cli.main(command.split()) == 0
    here = {"level", "duration_s"}  # what depends on the machine
    shown, written = (
        [{key: None if key in here else value for key, value in json.loads(line).items()} for line in text.splitlines()]
        for text in (report, Path("reports.jsonl").read_text())
    )
    assert written == shown


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration_page(), encoding="utf-8")
    (CONFIGS / "schema.json").write_text(format_schema(), encoding="utf-8")
