"""Findings that a return hides: answers that are cut, copied, repetitive, alike or off their prompt, and idle rewards.

A return also rises when agents copy their prompt until they are cut off, when they learn phrases that fit any prompt,
or when part of the reward has not varied for twenty iterations. This module finds all that in the evaluations and in
the metrics of the stages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from magrpo.config.run import RunConfig
from magrpo.envs.program import AgentProgram
from magrpo.reports.figures import quantity_title
from magrpo.reports.series import StageMetrics, metric_series, metrics_by_iteration
from magrpo.run.files import read_evaluations
from magrpo.run.store import RunStore
from magrpo.text import format_count, make_printable
from magrpo.types import HEADLINE, AnswerStats, EvalReport

MAX_CUT_OFF = 0.1
MAX_COPIED = 0.5
MAX_REPEATED = 0.3
"""Shares of an agent's answers (cut off) or of their words (copied, repeated) from which on there is a finding."""
MIN_PROMPT_WORDS = 0.2
"""Smallest share of prompt words in answers before training for which losing them counts as a finding."""
MAX_LOST = 0.5
"""Training may lower the share of prompt words by less than this fraction of it; more is a finding."""
MAX_ALIKE = 0.5
"""From this share of answers with the same first words on there is a finding, if training at least doubled it."""
_OPENING_WORDS = 3
_MIN_WORDS = 10
"""Answers shorter than this have no opening: a single number or word may well be the same everywhere."""
MAX_EQUAL_GROUPS = 0.9
NEAR_FULL = 0.95
"""Share of its maximum from which a constant part of the reward counts as learned."""
CONVERGED = 0.8
"""Training return, as a share of the maximum, from which groups with equal returns are a success: answers agree."""
WINDOW = 5
"""Number of newest iterations over which training metrics are averaged, and for which a part of the reward must be
constant before it counts as one without signal."""
_NOTABLE_COPY = 0.2
"""Smallest share of copied words for which a single answer is marked."""
_HELPED = "cooperation"
"""The part of the coding rewards that depends on calls of the helper's function."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that the return hides: a sentence without a full stop, and the settings that would help."""

    sentence: str
    remedy: str


def describe_answer(stats: AnswerStats, *, is_code: bool) -> str:
    """``cut at 48 tokens, 81% of the words copied from the prompt``; empty if the answer is unremarkable.

    ``is_code``: the answer is a program, which may repeat its specification.
    """
    remarks = [f"cut at {stats.tokens} tokens"] if stats.cut_off else []
    if not is_code and stats.copied_frac >= _NOTABLE_COPY:
        remarks.append(f"{stats.copied_frac:.0%} of the words copied from the prompt")
    return ", ".join(remarks)


def find_answer_faults(reports: Sequence[EvalReport], config: RunConfig) -> Iterator[Finding]:
    """Find faults of the sampled answers to held-out problems in the last of the evaluations of a run.

    Copying and leaving the prompt count only where no program is tested: tests say whether a program is about its
    specification, and it gains nothing by repeating it.
    """
    are_texts = _are_texts(reports[-1])
    first, last = reports[0], reports[-1]
    for agent in (agent.name for agent in config.agents):
        cut, copied, repeated, words = (
            _read_share(last, agent, name)
            for name in ("cut_off_frac", "copied_frac", "repeated_frac", "prompt_words_frac")
        )
        if cut >= MAX_CUT_OFF:
            yield _describe_cuts(agent, cut, "are cut", config)
        if are_texts and copied >= MAX_COPIED:
            sentence = f"{copied:.0%} of the words in {agent}'s answers are copied from its prompt"
            yield Finding(sentence, _advise_against_copies(config))
        if repeated >= MAX_REPEATED:
            sentence = f"{repeated:.0%} of the words in {agent}'s answers are repetitions of its own text"
            yield Finding(sentence, _advise_against_repetition(config))
        before = _read_share(first, agent, "prompt_words_frac")
        is_measured = f"{agent}/prompt_words_frac" in last.summary[HEADLINE]
        if are_texts and is_measured and before >= MIN_PROMPT_WORDS and words <= (1 - MAX_LOST) * before:
            yield Finding(
                f"{agent}'s answers leave their prompt: it has {words:.0%} of their long words, {before:.0%} before "
                "training",
                _advise_to_stay(config),
            )


def _read_share(report: EvalReport, agent: str, quantity: str) -> float:
    """Read a share of an agent's sampled held-out answers, or of their words; 0 if the report has no such share."""
    interval = report.summary[HEADLINE].get(f"{agent}/{quantity}")
    return interval.mean if interval else 0.0


def _describe_cuts(agent: str, share: float, verb: str, config: RunConfig) -> Finding:
    limit = config.rollout.max_new_tokens
    return Finding(
        f"{share:.0%} of {agent}'s answers {verb} at {limit} tokens",
        f"raise rollout.max_new_tokens (now {limit}), or penalty.cut_off (now {config.penalty.cut_off:g}) to make cut "
        "answers cost reward",
    )


def _are_texts(report: EvalReport) -> bool:
    """Whether the answers are texts, which no test judges."""
    return all(row.passed[-1] is None for row in report.rows)


def read_findings(store: RunStore) -> list[Finding]:
    """Find the problems of the run in ``store`` from everything that it has committed."""
    return list_findings(list(store.stage_metrics()), read_evaluations(store), store.config())


def list_findings(metrics: StageMetrics, reports: Sequence[EvalReport], config: RunConfig) -> list[Finding]:
    """List the findings about a run so far, those about its answers first; ``reports`` are its evaluations."""
    return [
        *(find_answer_faults(reports, config) if reports else ()),
        *_find_cuts_in_training(metrics, reports, config),
        *_find_phrases(reports, config),
        *_find_silent_parts(metrics, config),
        *_find_equal_groups(metrics, config),
        *_find_large_gradients(metrics, config),
    ]


def list_warnings(findings: Iterable[Finding], verdict_sentence: str) -> list[str]:
    """List the sentences of the findings that the verdict does not already mention."""
    return [finding.sentence for finding in findings if finding.sentence not in verdict_sentence]


def list_advice(findings: Iterable[Finding], verdict_advice: str) -> list[str]:
    """List advice for a run: the remedies of its findings, each once, then the advice of its verdict, if any."""
    advice = [*(finding.remedy for finding in findings), *filter(None, [verdict_advice])]
    return list(dict.fromkeys(advice))


def answer_rows(
    metrics: StageMetrics, reports: Sequence[EvalReport], config: RunConfig
) -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield rows of a table about each agent's answers and updates: title, a cell for each agent, related settings.

    Cells compare the first with the last evaluation for answers, and the first with the last iteration for entropy and
    gradient norm: ``41.0 -> 43.9``.
    """
    names = [agent.name for agent in config.agents]
    for quantity, (title, scale, digits, settings) in _ANSWER_ROWS.items():
        cells = []
        for name in names:
            key = f"{name}/{quantity}"
            values = [report.summary[HEADLINE][key].mean for report in reports if key in report.summary[HEADLINE]]
            cells.append(_format_change([scale * value for value in values], digits))
        yield title, cells, settings
    for quantity, (title, settings) in _UPDATE_ROWS.items():
        series = [metric_series(metrics, f"update/{name}/{quantity}") for name in names]
        if any(series):
            cells = [_format_change([value for _, value in points], 3) for points in series]
            yield title, cells, settings


_ANSWER_ROWS = {
    "response_tokens": ("tokens per answer", 1.0, 1, "rollout.max_new_tokens"),
    "cut_off_frac": ("cut at the limit, %", 100.0, 1, "rollout.max_new_tokens, penalty.cut_off, algo.loss_norm"),
    "copied_frac": ("copied from the prompt, %", 100.0, 1, "model.chat_template, penalty.copied, the reward"),
    "repeated_frac": ("repeats itself, %", 100.0, 1, "rollout.temperature, penalty.repeated, the reward"),
    "prompt_words_frac": ("long words that the prompt has, %", 100.0, 1, "optim.lr, penalty.strayed, the reward"),
}
"""Title, factor, digits and settings of each quantity."""
_UPDATE_ROWS = {
    "entropy": ("entropy, nats per token", "optim.lr, rollout.temperature, algo.beta"),
    "grad_norm": ("gradient norm", "optim.max_grad_norm, optim.lr"),
}


def _format_change(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    first, last = (f"{value:.{digits}f}" for value in (values[0], values[-1]))
    return first if len(values) == 1 else f"{first} \u2192 {last}"


def _series(metrics: StageMetrics, stage: str) -> list[Mapping[str, float]]:
    """Return the metrics of a stage in each iteration that has committed it."""
    return list(metrics_by_iteration(metrics, (stage,)).values())


def _mean_of_newest(series: Sequence[Mapping[str, float]], key: str) -> float | None:
    values = [one[key] for one in series[-WINDOW:] if key in one]
    return fmean(values) if values else None


def _find_cuts_in_training(
    metrics: StageMetrics, reports: Sequence[EvalReport], config: RunConfig
) -> Iterator[Finding]:
    """Find agents whose answers were cut in the newest iterations, but not at the last evaluation."""
    for agent in (agent.name for agent in config.agents):
        share = _mean_of_newest(_series(metrics, "rollout"), f"rollout/{agent}/cut_off_frac") or 0.0
        evaluated = _read_share(reports[-1], agent, "cut_off_frac") if reports else 0.0
        if share >= MAX_CUT_OFF > evaluated:
            yield _describe_cuts(agent, share, "in training were cut", config)


def _advise_against_repetition(config: RunConfig) -> str:
    temperature = config.rollout.temperature
    return (
        f"read the answers in the report; raise rollout.temperature (now {temperature:g}) or, if the reward favours "
        f"repetitions, penalty.repeated (now {config.penalty.repeated:g})"
    )


def _advise_against_copies(config: RunConfig) -> str:
    advice = (
        "read the answers with the highest reward in the report: if the reward favours copies, raise penalty.copied "
        f"(now {config.penalty.copied:g})"
    )
    if config.model.chat_template == "none":
        advice += '; an instruct model needs its chat template (model.chat_template = "auto")'
    return advice


def _advise_to_stay(config: RunConfig) -> str:
    """Advise on answers that leave their prompt."""
    return (
        f"read the answers in the report; raise penalty.strayed (now {config.penalty.strayed:g}) to make leaving the "
        f"prompt cost reward, or lower optim.lr (now {config.optim.lr:g})"
    )


def _find_phrases(reports: Sequence[EvalReport], config: RunConfig) -> Iterator[Finding]:
    """Find agents whose texts begin alike since training. A good phrase is no fault, so the reader has to decide."""
    if not reports or not _are_texts(reports[-1]):
        return
    for agent in config.agents:
        (_, before), (opening, share) = (_find_opening(report, agent.name) for report in (reports[0], reports[-1]))
        if share >= MAX_ALIKE and share >= 2 * before:
            yield Finding(
                f'{share:.0%} of {agent.name}\'s answers begin with "{opening}", while before training at most '
                f"{before:.0%} began alike",
                f"read the answers in the report; if the phrase is out of place, raise algo.beta (now "
                f"{config.algo.beta:g}) to hold the agents near the untrained model",
            )


def _find_opening(report: EvalReport, agent: str) -> tuple[str, float]:
    """Find the most common first words of an agent's sampled held-out answers, and the share of answers with them."""
    texts = [row.texts.get(agent, "").split() for row in report.rows if f"{row.split}/{row.mode}" == HEADLINE]
    openings = Counter(" ".join(words[:_OPENING_WORDS]) for words in texts if len(words) >= _MIN_WORDS)
    if not openings:
        return "", 0.0
    [(opening, count)] = openings.most_common(1)
    return make_printable(opening), count / len(texts)


def _find_silent_parts(metrics: StageMetrics, config: RunConfig) -> Iterator[Finding]:
    """Find parts of the reward that were equal within every group in the newest iterations, though not nearly full.

    Without siblings as baseline, agents learn from equal rewards, too.
    """
    if not config.all_have_baselines:
        return
    credits, scores = _series(metrics, "credit"), _series(metrics, "score")
    maxima = config.reward.maxima
    for part, maximum in maxima.items():
        silent = 0
        while silent < len(credits) and credits[-1 - silent].get(f"signal/{part}") == 0:
            silent += 1
        if silent < 2 or silent < min(WINDOW, len(credits)):
            continue
        share = fmean(one[f"reward/{part}"] for one in credits[-silent:]) / maximum
        if share >= NEAR_FULL:
            continue
        iterations = format_count(silent, "iterations")
        sentence = (
            f"{quantity_title(part)} ({maximum / sum(maxima.values()):.0%} of the reward) gave no signal for "
            f"{iterations}: it was equal within every group, {share:.0%} of its maximum on average"
        )
        watched = sum(one.get("sandbox/watched", 0.0) for one in scores[-silent:])
        called = sum(one.get("sandbox/watched", 0.0) * one.get("sandbox/called_frac", 0.0) for one in scores[-silent:])
        remedy = "change the prompts until answers differ in it, or raise " + _more_variety(config)
        if part == _HELPED and watched:
            sentence += f"; the helper's function was called in {called:.0f} of {watched:.0f} programs"
            if not config.algo.lenience and _can_cross(config):
                remedy += ', or begin anew with rollout.joint_mode = "crossed" and algo.lenience = 0.75'
        yield Finding(sentence, remedy)


def _find_equal_groups(metrics: StageMetrics, config: RunConfig) -> Iterator[Finding]:
    credits = _series(metrics, "credit")
    equal, reward = _mean_of_newest(credits, "reward/frac_groups_equal"), _mean_of_newest(credits, "reward/joint")
    if equal is None or reward is None or equal < MAX_EQUAL_GROUPS or config.reward.fraction(reward) >= CONVERGED:
        return
    newest = format_count(min(WINDOW, len(credits)), "iterations")
    yield Finding(
        f"{equal:.0%} of the groups of the last {newest} had equal returns, which teach nothing",
        f"choose problems that are neither too easy nor too hard, or raise {_more_variety(config)}",
    )


def _more_variety(config: RunConfig) -> str:
    rollout = config.rollout
    return f"rollout.temperature (now {rollout.temperature:g}) or rollout.group_size (now {rollout.group_size})"


def _can_cross(config: RunConfig) -> bool:
    """Whether crossing would pair anything: several agents act at once, and not in a program's episode."""
    return max(config.count_acting()) > 1 and not isinstance(config.env, AgentProgram)


def _find_large_gradients(metrics: StageMetrics, config: RunConfig) -> Iterator[Finding]:
    updates = _series(metrics, "update")
    limit = config.optim.max_grad_norm
    remedy = f"raise rollout.group_size (now {config.rollout.group_size}), which makes gradients less noisy"
    if config.rollout.joint_mode == "aligned" and _can_cross(config):
        remedy += '; so does rollout.joint_mode = "crossed", for no more tokens'
    for agent in config.agents:
        norm = _mean_of_newest(updates, f"update/{agent.name}/grad_norm")
        if norm is not None and norm > 10 * limit:
            yield Finding(
                f"the gradient norm of {agent.name} is {norm:.1f}, far above optim.max_grad_norm = {limit:g}",
                remedy,
            )
