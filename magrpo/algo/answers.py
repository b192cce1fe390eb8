"""Statistics of answers that need no reward: their length, whether they were cut off, and what they repeat."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from magrpo.algo.repetition import find_copied, find_repeated, leave_out, marked_share, share_prompt_words
from magrpo.types import Action, AnswerStats, Episode, Prompt, RolloutGroup, T, TrajectoryStep

AgentTexts = Mapping[str, str]
"""The texts of one turn, by agent."""

ANSWER_QUANTITIES = ("response_tokens", "cut_off_frac", "copied_frac", "repeated_frac", "prompt_words_frac")
"""Names of the quantities measured for the answers of each agent."""


def measure_answer(action: Action, asked: str, task: str, earlier: Sequence[AgentTexts] = ()) -> AnswerStats:
    """Measure one completion.

    ``asked``: its prompt, which may quote ``task``, the problem's text, and ``earlier``, the texts of earlier turns. A
    revision may keep its agent's own words, so they do not count as copied. No earlier text shows what the prompt is
    about.
    """
    own = [texts[action.agent] for texts in earlier if action.agent in texts]
    written = [text for texts in earlier for text in texts.values()]
    return AnswerStats(
        tokens=len(action.token_ids),
        cut_off=action.finish_reason == "length",
        copied_frac=marked_share(find_copied(action.text, asked, own)),
        repeated_frac=marked_share(find_repeated(action.text)),
        prompt_words_frac=share_prompt_words(action.text, leave_out(asked, written, task)),
    )


def read_prompt(prompt: Prompt) -> str:
    """The text of the messages of a prompt."""
    return "\n".join(message.content for message in prompt.observation.messages)


def measure_calls(episode: Episode, task: str) -> dict[str, list[AnswerStats]]:
    """Measure every completion of an episode, by agent; ``task`` is the problem's text.

    Earlier texts count as written by the agents, not as asked.
    """
    measured: dict[str, list[AnswerStats]] = defaultdict(list)
    for number, call in enumerate(episode.calls):
        asked = "\n".join(str(message.get("content", "")) for message in episode.messages(number))
        # An agent may be asked to merge or to choose, so it may keep the texts of all agents.
        earlier = [{call.agent: before.action.text} for before in episode.calls[:number]]
        stats = measure_answer(call.action, asked, task, earlier)
        measured[call.agent].append(replace(stats, cut_off=stats.cut_off and not call.ends_early))
    return measured


def measure_step(step: TrajectoryStep, task: str, earlier: Sequence[AgentTexts] = ()) -> dict[str, AnswerStats]:
    """Measure the latest completion of each agent in one turn.

    ``task``: the problem's text. ``earlier``: the texts of earlier turns, by agent.
    """
    if step.episode is not None:
        return {agent: measured[-1] for agent, measured in measure_calls(step.episode, task).items()}
    return {
        agent: measure_answer(action, read_prompt(step.prompts[agent]), task, earlier)
        for agent, action in step.actions.items()
    }


def list_actions(group: RolloutGroup[T]) -> list[Action]:
    """Every completion of a node or of its episodes."""
    sampled = [action for completions in group.actions.values() for action in completions]
    return sampled + [call.action for episode in group.episodes for call in episode.calls]


def list_quantities(stats: AnswerStats) -> dict[str, float]:
    """The statistics of an answer as numbers, keyed by :data:`ANSWER_QUANTITIES`."""
    shares = (stats.copied_frac, stats.repeated_frac, stats.prompt_words_frac)
    return dict(zip(ANSWER_QUANTITIES, (float(stats.tokens), float(stats.cut_off), *shares), strict=True))


def measure_completions(group: RolloutGroup[T]) -> dict[str, list[AnswerStats]]:
    """Measure every completion of a node or of its episodes, by agent."""
    earlier, task = [past.texts for past in group.history], group.problem.prompt
    measured = {
        agent: [measure_answer(action, read_prompt(group.prompts[agent]), task, earlier) for action in actions]
        for agent, actions in group.actions.items()
    }
    for episode in group.episodes:
        for agent, stats in measure_calls(episode, task).items():
            measured.setdefault(agent, []).extend(stats)
    return measured


def answer_metrics(groups: Sequence[RolloutGroup[T]]) -> dict[str, float]:
    """The metrics ``rollout/<agent>/<quantity>``: means over the completions of each agent that acted."""
    measured: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for agent, completions in measure_completions(group).items():
            for stats in completions:
                for name, value in list_quantities(stats).items():
                    measured[f"rollout/{agent}/{name}"].append(value)
    return {name: fmean(values) for name, values in measured.items()}
