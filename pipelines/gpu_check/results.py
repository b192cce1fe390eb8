"""Results of the steps, and the report that is made of them: JSON, and Markdown for magrpo_kernels/RESULTS.md."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from magrpo.files.writing import atomic_write

Verdict = Literal["ok", "note", "missed", "failed"]
JSON_FILE, MARKDOWN_FILE = "gpu-report.json", "gpu-report.md"


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement or check.

    ``note``: nothing is expected; ``missed``: right, but slower or larger than expected; ``failed``: wrong.
    """

    name: str
    found: str
    expected: str = ""
    verdict: Verdict = "ok"
    remedy: str = ""
    """What to do about it, of a failure."""
    value: float | None = None
    """The number in ``found``, in the units named there."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one step."""

    name: str
    title: str
    seconds: float
    results: tuple[Result, ...]

    @property
    def failure(self) -> Result | None:
        """The first failure, if there is one."""
        return next((result for result in self.results if result.verdict == "failed"), None)


def judge(name: str, found: str, expected: str, good: bool, remedy: str) -> Result:
    """The result of a check that ends the command with exit code 1 unless it is ``good``."""
    return Result(name, found, expected, "ok" if good else "failed", "" if good else remedy)


def find_failure(steps: Sequence[StepReport]) -> Result | None:
    """The first failure of all steps."""
    return next((step.failure for step in steps if step.failure), None)


def write_report(folder: Path, about: dict[str, str], steps: Sequence[StepReport]) -> None:
    """Write both files into ``folder``. ``about``: hardware and versions, by name."""
    failure = find_failure(steps)
    content: dict[str, Any] = {
        "about": about,
        "failure": None if failure is None else asdict(failure),
        "steps": [asdict(step) for step in steps],
    }
    atomic_write(folder / JSON_FILE, json.dumps(content, indent=1).encode() + b"\n")
    atomic_write(folder / MARKDOWN_FILE, "\n".join(list_markdown(about, steps)).encode() + b"\n")


def list_markdown(about: dict[str, str], steps: Sequence[StepReport]) -> Iterator[str]:
    """Lines of a section for RESULTS.md."""
    yield f"## {about['device']}"
    yield ", ".join(f"{name} {value}" for name, value in about.items() if name != "device") + ", by"
    yield "`magrpo doctor --gpu`."
    for step in steps:
        yield from ("", f"### {step.title} ({step.seconds:.0f} s)", "| | found | expected | |", "|---|---|---|---|")
        for result in step.results:
            cells = (result.name, result.found, result.expected, result.verdict if result.verdict != "note" else "")
            yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
