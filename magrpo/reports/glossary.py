"""Meanings of the words in reports: the glossary at the end of each page."""

from collections.abc import Iterable

MEANINGS = {
    "return": "the joint reward of a trajectory as a share of the maximum",
    "structure": "reward part: every answer has the form that its agent was asked for",
    "syntax": "reward part: the joined program compiles",
    "tests": "reward part: the share of the problem's tests that the joined program passes",
    "cooperation": "reward part: main called the helper's function, used its result, and both functions did real work",
    "length ratio": "reward part: the ratio of the texts' lengths, second to first, is near the target",
    "unique words": "reward part: the ratio of the texts' vocabulary sizes, second to first, is near the target",
    "style": "reward part: the texts contain transition words and share part of their vocabulary",
    "consistency": "the overlap of the vocabularies of two texts, as a share of its target",
    "coherence": "the variety of transition words in the texts",
    "penalty": "the cost of cut, copied or repetitive answers; at most 0, a share of the maximum",
    "pass@1": "the share of sampled trajectories that pass every test",
    "pass@k": "the probability that at least one of k sampled trajectories passes every test",
    "generated tokens": "mean number of tokens per trajectory, over all agents and turns",
    "cut at the limit": "the completion reached rollout.max_new_tokens before the agent had finished",
    "copied from the prompt": "the share of an answer's words copied from its prompt in runs of eight or more words",
    "repeats itself": "the share of an answer's words in runs of eight or more words that it had already written",
    "entropy": "minus the mean log-probability of the sampled tokens; 0 if an agent always writes the same text",
    "gradient norm": "the norm of an agent's gradient before clipping",
    "gain": "the last evaluation minus the first, paired by problem",
    "held-out problems": "problems of the same kinds as the training problems, never trained on",
    "ood": "out of distribution: problems of kinds that do not occur in training",
    "sampled": "completions drawn at the training temperature",
    "greedy": "the most likely token at every step",
    "iteration": "one round of sampling, scoring and updating every agent",
    "joint action": "one completion from every agent, taken together",
    "before training": "the base models, or the agents that the run started from, before any update",
    "[low, high]": "95 % confidence interval: of 100 intervals made this way from other problem sets, about 95 contain "
    "the true mean",
    "~": "the interval of a difference contains 0: no reliable difference",
}


def select_meanings(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return the words of the glossary that occur in ``texts``, with their meanings, in the order of the glossary."""
    everything = "\n".join(texts).lower()
    found = {word for word in MEANINGS if word in everything}
    found |= {"pass@k"} if "pass@" in everything.replace("pass@1", "") else set()
    found |= {"[low, high]"} if "[" in everything else set()
    return [(word, meaning) for word, meaning in MEANINGS.items() if word in found]
