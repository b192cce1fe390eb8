"""The table of ``magrpo runs`` and the addresses at the end of a run, on narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipelines.commands.runs import Summary, format_runs
from pipelines.training.closing import print_address

PAGE = "http://127.0.0.1:5000/#/experiments/1/runs/2494ba68a25b415885b3fa381de4144c"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_fewer_columns_instead_of_broken_words(width: int) -> None:
    config = {"train.num_iterations": "160"}
    runs = [Summary(name, "finished", 160, (0.5, 0.9), 0.0, 399.0, config) for name in ("small-steps", "as-it-ships")]
    out = io.StringIO()
    Console(file=out, width=width).print(format_runs(runs, width))
    [first, second] = [line.split() for line in out.getvalue().splitlines()[3:5]]
    whole = ["finished", "160/160", "50.0%", "\u2192", "90.0%", "6", "min", "39", "s", "1970-01-01"]
    assert first[1:11] == whole[: {60: 5, 80: 9, 100: 10}[width]]
    assert (first[0], second[0]) == ("small-steps", "as-it-ships")


@pytest.mark.parametrize(("width", "shown"), [(80, PAGE), (140, f"{PAGE}?workflowType=machine_learning")])
def test_an_address_stays_on_a_line_and_leads_to_the_whole_page(width: int, shown: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True)
    print_address("MLflow:", f"{PAGE}?workflowType=machine_learning", console)
    assert any(line.endswith(f"\\{shown}\x1b]8;;\x1b\\") for line in out.getvalue().splitlines())
    assert f"{PAGE}?workflowType=machine_learning\x1b" in out.getvalue()
