"""Two authors in turn: ``summary`` writes a post in short, ``elaboration`` reads that and writes it at length.

magrpo train tldr_program agents.0.model=FOLDER agents.1.model=FOLDER problems.source=posts.jsonl.gz
"""

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

SHORT = """\
Summarise this post in one or two plain sentences.

The post:
{post}

Write the short summary only."""
LONG = """\
A colleague has summarised a post in short. Write a summary that is two to three times as long. Keep to the words of \
the post and of the short summary, add details from the post, and lead the reader with transition words.

The post:
{post}

The short summary:
{short}

Write the longer summary only."""


def write(problem: Problem, agents: Agents) -> dict[str, str]:
    """Let the second author read what the first has written; both texts are priced together."""
    short = agents["summary"].ask(SHORT.format(post=problem.prompt))
    long = agents["elaboration"].ask(LONG.format(post=problem.prompt, short=short))
    return {"summary": short, "elaboration": long}
