"""English word lists of the writing rewards: stop words, and transition words in twelve categories."""

from __future__ import annotations

import re
from collections.abc import Mapping

_STOP_WORDS = """
    a about above after again all also am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers him his how
    i if in into is it its just may me might more most must my no nor not now of off on once only or other our ours out
    over own same shall she should so some such than that the their theirs them then there these they this those
    through to too under until up us very was we were what when where which while who whom why will with would you your
    yours
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

TRANSITIONS: Mapping[str, str] = {
    "addition": """also; additionally; besides; furthermore; moreover; likewise; in addition; as well as; along with;
        together with; not only; what is more; on top of that""",
    "example": """for example; for instance; such as; including; namely; in particular; particularly; especially;
        specifically; notably; to illustrate; mainly; above all""",
    "explanation": """in other words; that is; in fact; indeed; essentially; basically; fundamentally; more precisely;
        to clarify; put simply; actually; in essence; clearly""",
    "cause": """because; therefore; thus; hence; consequently; accordingly; as a result; as a consequence; so; thereby;
        due to; owing to; for this reason; thanks to; resulting in""",
    "contrast": """however; but; yet; still; whereas; instead; rather; conversely; in contrast; by contrast;
        on the other hand; on the contrary; alternatively; otherwise; unlike""",
    "sequence": """first; firstly; second; secondly; third; thirdly; then; next; finally; lastly; initially;
        subsequently; to begin with; after that; in the end; eventually""",
    "emphasis": """certainly; surely; definitely; undoubtedly; absolutely; of course; naturally; obviously; evidently;
        significantly; importantly; without doubt; undeniably""",
    "summary": """overall; in summary; in conclusion; in short; in brief; briefly; to summarize; to summarise;
        to conclude; to sum up; all in all; on the whole; ultimately; after all""",
    "comparison": """similarly; equally; just as; just like; in the same way; by analogy; analogously; comparable to;
        in comparison; compared to; compared with; correspondingly; as with""",
    "concession": """although; though; even though; despite; in spite of; nevertheless; nonetheless; notwithstanding;
        regardless; even so; admittedly; granted; albeit""",
    "condition": """if; unless; provided that; assuming that; as long as; given that; in case; on condition that;
        only if; even if; whether; or else; supposing""",
    "time": """when; while; before; after; until; since; during; meanwhile; later; recently; currently; previously;
        earlier; now; at the same time; simultaneously; immediately""",
}
"""Transition words and phrases by category, separated by semicolons."""


def _compile_pattern(listing: str) -> re.Pattern[str]:
    phrases = (" ".join(phrase.split()) for phrase in listing.split(";"))
    return re.compile(r"\b(?:" + "|".join(re.escape(phrase).replace(r"\ ", r"\s+") for phrase in phrases) + r")\b")


_PATTERNS = {category: _compile_pattern(listing) for category, listing in TRANSITIONS.items()}


def count_transition_categories(text: str) -> int:
    """The number of the twelve categories that occur in ``text`` as whole words, ignoring case."""
    text = text.lower()
    return sum(pattern.search(text) is not None for pattern in _PATTERNS.values())
