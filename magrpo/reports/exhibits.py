"""Completions shown in a report, chosen by rule, so that equal runs show equal ones."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from magrpo.algo.repetition import find_copied, marked_spans
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.figures import UNDEFINED, quantity_title
from magrpo.reports.health import describe_answer
from magrpo.reports.page import Exhibit, ShownText
from magrpo.reports.tables import ReportTable
from magrpo.types import PENALTY, AnswerStats, EvalReport, EvalRow

NUM_BEST = 3


def choose_examples(run: EvaluatedRun) -> list[Exhibit]:
    """Choose the held-out problems with the largest, median and smallest mean gain of return, largest first.

    Each problem shows two sampled trajectories, before and after training, of the same number: a pair that differs and
    whose gain is nearest to the problem's mean gain. With one evaluation, choose the problems with the highest, median
    and lowest mean return, and the trajectory nearest to that mean.
    """
    after = _sampled_trajectories(run.last)
    single = len(run.reports) == 1
    before = {} if single else _sampled_trajectories(run.reports[0])
    gains = {task_id: _paired_gains(run, before.get(task_id, {}), rows) for task_id, rows in after.items()}
    means = {task_id: fmean(of_problem.values()) for task_id, of_problem in gains.items() if of_problem}
    order = sorted(means, key=lambda task_id: (means[task_id], task_id))
    if not order:
        return []
    words = ("Highest return", "Middle return", "Lowest return")
    if not single:
        words = (
            "Largest gain" if means[order[-1]] > 0 else "Smallest loss",
            "Median gain",
            "Largest loss" if means[order[0]] < 0 else "Smallest gain",
        )
    chosen: dict[str, str] = {}
    for task_id, word in zip((order[-1], order[len(order) // 2], order[0]), words, strict=True):
        chosen.setdefault(task_id, word)  # with few problems, one may be chosen twice: it keeps the first word
    exhibits: list[Exhibit] = []
    for task_id, word in chosen.items():
        rows = before.get(task_id, {})
        index = _find_typical(gains[task_id], rows, after[task_id])
        sides = {"": after[task_id][index]} if single else {"before": rows[index], "after": after[task_id][index]}
        mean = means[task_id]
        if single:
            title = f"{word}, {mean:.1f} %: {task_id}"
        elif abs(mean) >= 0.05:  # else it would be shown as 0.0
            title = f"{word}, {mean:+.1f} points: {task_id}"
        else:
            title = f"No change: {task_id}"
        exhibits.append(_make_exhibit(title, sides, run, shows_prompts=not exhibits))
    return exhibits


def describe_choice(run: EvaluatedRun) -> str:
    """State in words the rule by which :func:`choose_examples` chooses the first problem."""
    if len(run.reports) == 1:
        return (
            "The held-out problem with the highest return. Of its sampled answers this is the closest to the average."
        )
    return "The held-out problem that gained most. Of its sampled answers this pair is closest to the average gain."


def choose_best_answers(run: EvaluatedRun) -> list[Exhibit]:
    """Choose the sampled held-out answers with the highest return, at most one for each problem.

    Among equal returns, the answer with the largest share of copied words comes first. If agents exploit the reward,
    these answers show it first: they earn much and are poor.
    """

    def order(row: EvalRow) -> tuple[float, float, str, int]:
        copied = max((stats.copied_frac for stats in row.answers.values()), default=0.0)
        return -row.returns[-1], -copied, row.task_id, row.index

    rows = [row for row in run.last.rows if (row.split, row.mode) == ("test", "sampled")]
    best: dict[str, EvalRow] = {}
    for row in sorted(rows, key=order):
        best.setdefault(row.task_id, row)
    fraction = run.config.reward.fraction
    return [
        _make_exhibit(f"Return {100 * fraction(row.returns[-1]):.1f} %: {task_id}", {"": row}, run)
        for task_id, row in list(best.items())[:NUM_BEST]
    ]


def _sampled_trajectories(report: EvalReport) -> dict[str, dict[int, EvalRow]]:
    """Return the sampled trajectories of each held-out problem by their number."""
    rows: dict[str, dict[int, EvalRow]] = defaultdict(dict)
    for row in report.rows:
        if (row.split, row.mode) == ("test", "sampled"):
            rows[row.task_id][row.index] = row
    return rows


def _paired_gains(run: EvaluatedRun, before: Mapping[int, EvalRow], after: Mapping[int, EvalRow]) -> dict[int, float]:
    """Return the gain between trajectories of the same number, or the return of a single evaluation, in percent."""
    fraction = run.config.reward.fraction
    if len(run.reports) == 1:
        return {index: 100 * fraction(row.returns[-1]) for index, row in after.items()}
    return {
        index: 100 * (fraction(row.returns[-1]) - fraction(before[index].returns[-1]))
        for index, row in after.items()
        if index in before
    }


def _find_typical(gains: Mapping[int, float], before: Mapping[int, EvalRow], after: Mapping[int, EvalRow]) -> int:
    """Find the trajectory whose gain is nearest to the mean, preferring ones whose texts changed."""
    changed = [index for index in gains if index not in before or before[index].texts != after[index].texts]
    mean = fmean(gains.values())
    return min(changed or gains, key=lambda index: (abs(gains[index] - mean), index))


def _make_exhibit(
    title: str, sides: Mapping[str, EvalRow], run: EvaluatedRun, *, shows_prompts: bool = False
) -> Exhibit:
    """Build the exhibit of one problem: completions, and their reward by part and turn."""
    reward = run.config.reward
    turns = [
        (_name_turn(name, turn, len(row.returns)), row, turn)
        for name, row in sides.items()
        for turn in range(len(row.returns))
    ]
    [task_id] = {row.task_id for row in sides.values()}
    largest = {part: f"{top:g}" for part, top in reward.maxima.items()}
    if any(PENALTY in row.parts[turn] for _, row, turn in turns):
        largest.setdefault(PENALTY, "0")
    lines = [
        (quantity_title(part), top, *(_format_part(row.parts[turn], part) for _, row, turn in turns))
        for part, top in largest.items()
    ]
    returns = (
        f"{100 * reward.fraction(row.returns[turn]):.1f}" if row.parts[turn] else UNDEFINED for _, row, turn in turns
    )
    lines.append(("return, %", "100", *returns))
    table = ReportTable("", ("", "at most", *(name or "reward" for name, _, _ in turns)), lines)
    problem = run.problems[task_id]
    prompts = _first_prompts(run, task_id)
    is_code = bool(problem.entry_point)
    # Copied passages are marked in texts only: a program may repeat its specification.
    sources: Mapping[str, str] = {} if is_code else prompts
    texts = {}
    for name, row in sides.items():
        shown = [
            _show_text(agent, text, row.answers[agent], sources.get(agent, "")) for agent, text in row.texts.items()
        ]
        texts[name or "completions"] = shown
    return Exhibit(title, problem.prompt, table, texts, is_code, prompts if shows_prompts else {})


def _format_part(parts: Mapping[str, float], part: str) -> str:
    """Format a part of the reward of one turn; a dash without any part, before every role has written."""
    return f"{parts.get(part, 0.0):.2f}" if parts else UNDEFINED


def _name_turn(side: str, turn: int, num_turns: int) -> str:
    """``before, turn 2``: just the side if there is one turn, just the turn if the side has no name."""
    names = [side] if side else []
    if num_turns > 1:
        names.append(f"turn {turn + 1}")
    return ", ".join(names)


def _show_text(agent: str, text: str, stats: AnswerStats, prompt: str) -> ShownText:
    """Annotate a completion. ``prompt``: text in which to look for copied passages; empty for programs."""
    remark = describe_answer(stats, is_code=not prompt)
    spans = list(marked_spans(text, find_copied(text, prompt))) if prompt else []
    return ShownText(agent, text, f"[{remark}]" if remark else "", spans)


def _first_prompts(run: EvaluatedRun, task_id: str) -> dict[str, str]:
    """Return each agent's first prompt for a problem, as far as the last evaluation kept it."""
    trajectory = run.trajectories.get(task_id)
    if trajectory is None:
        return {}
    seen = {agent: messages for step in reversed(trajectory.steps) for agent, messages in step.first_messages.items()}
    return {
        agent: "\n\n".join(f"{message['role']}:\n{message['content']}" for message in messages)
        for agent, messages in seen.items()
    }
