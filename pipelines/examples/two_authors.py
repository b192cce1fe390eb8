"""Two authors in turn: ``summary`` writes a post in short, ``elaboration`` reads that and writes it at length.

magrpo train tldr_program agents.0.model=FOLDER agents.1.model=FOLDER problems.source=posts.jsonl.gz
"""

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

# As for authors who write at once, the request stands below the text: small models otherwise write about the request.
SHORT = """\
{post}

Sum this up in one short sentence."""
LONG = """\
{post}

In short: {short}

Explain this in three sentences."""


def write(problem: Problem, agents: Agents) -> dict[str, str]:
    """Let the second author read what the first has written; both texts are priced together."""
    short = agents["summary"].ask(SHORT.format(post=problem.prompt))
    long = agents["elaboration"].ask(LONG.format(post=problem.prompt, short=short))
    return {"summary": short, "elaboration": long}
