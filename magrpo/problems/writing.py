"""Problem sets for two authors: posts to summarise (TLDR), and abstracts to expand into an introduction (arXiv).

The two writing tasks of arXiv 2508.04652, for the environment and the reward ``writing``. ``Problem.prompt`` is the
text; there are no tests.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from magrpo.errors import ConfigError
from magrpo.plugins import Plugin
from magrpo.problems.rows import check_source, is_single_file, one_line, read_rows, split_by_hash
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

log = logging.getLogger(__name__)
_POST = re.compile(r"(?:SUBREDDIT:\s*(\S+)\s+)?TITLE:\s*(.*?)\s*^POST:\s*(.*)", re.DOTALL | re.MULTILINE)
_ABSTRACTS = Path(__file__).with_name("abstracts.json")
_TLDR = re.compile(r"\s*TL;DR:?\s*$")


class TextsPlugin(Plugin):
    """Texts of a hub data set or a file. Texts that differ only in white space count once, in one split."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """Fields that may hold the text of a row; the first that exists is read."""

    source: str
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    hub_split: str = "train"
    """Training split if ``source`` is a hub id."""
    hub_test_split: str = "test"
    """Held-out split if ``source`` is a hub id. Empty: hold out ``test_frac`` of ``hub_split``."""
    test_frac: float = Field(0.2, gt=0, lt=1)
    """Fraction of a file's texts to hold out, chosen by a hash of the text."""
    num_train: int = Field(1000, ge=1)
    """Maximum number of training texts, taken from the start."""
    num_test: int = Field(1000, ge=1)
    """Maximum number of held-out texts, taken from the start."""
    min_words: int = Field(8, ge=1)
    """Minimum number of words; shorter texts are left out."""
    max_words: int = Field(500, ge=1)
    """Maximum number of words; longer texts are left out."""

    def check_source(self) -> None:
        """See :class:`magrpo.interfaces.ChecksSource`."""
        check_source(self.resolved_source)

    def load(self) -> dict[Split, list[Problem]]:
        """Load ``train`` and ``test``; warns if texts are left out because of their length.

        Raises:
            ConfigError: the source, a row or a field is unusable, or no text has an allowed length; the message names
                it and the remedy.
        """
        problems = self._read_problems(self.hub_split)
        if is_single_file(self.resolved_source) or not self.hub_test_split:
            splits = split_by_hash(list(problems.values()), self.test_frac, self.source)
        else:
            held_out = self._read_problems(self.hub_test_split)
            trainable = [problem for content, problem in problems.items() if content not in held_out]
            taken = {problem.task_id for problem in trainable}  # splits may number their texts alike
            test = [
                replace(problem, task_id=f"{self.hub_test_split}/{problem.task_id}")
                if problem.task_id in taken
                else problem
                for problem in held_out.values()
            ]
            splits = {"train": trainable, "test": test}
        return {"train": splits["train"][: self.num_train], "test": splits["test"][: self.num_test]}

    @property
    def resolved_source(self) -> str:
        """The file or hub id to read."""
        return self.source

    def _read_problems(self, split: str) -> dict[str, Problem]:
        """Read the problems whose text has an allowed length, one for each text, keyed by the words of the text."""
        problems: dict[str, Problem] = {}
        rows = read_rows(self.resolved_source, split)
        num_left_out = 0
        for row in rows:
            content = row.read_text(*self.fields)
            row.check_size(self.fields[0], content)
            text, tags = self.split_text(content.replace("\r\n", "\n").strip())
            if self.min_words <= len(text.split()) <= self.max_words:
                given = row.values.get("task_id")
                task_id = f"{self.name}/{derive_seed(text):016x}" if given in (None, "") else str(given)
                problems.setdefault(one_line(text), Problem(task_id, text, tags=tags))
            else:
                num_left_out += 1
        if not problems:
            raise ConfigError(
                f"{self.source}: no text has {self.min_words} to {self.max_words} words; widen problems.min_words and "
                "problems.max_words"
            )
        if num_left_out:
            message = "skipped %d of %d texts without %d to %d words (problems.min_words and problems.max_words)"
            log.warning(message, num_left_out, len(rows), self.min_words, self.max_words)
        return problems

    def split_text(self, text: str) -> tuple[str, dict[str, str]]:
        """Split the text of a row into the part that authors see and the tags of the problem."""
        return text, {}


class Tldr(TextsPlugin):
    """Posts to summarise, in the field ``prompt``; ``SUBREDDIT: ... TITLE: ... POST: ... TL;DR:`` is parsed.

    ``tags``: ``subreddit`` if the text names one. The field ``completion`` is not used.
    """

    name: ClassVar[str] = "tldr"
    fields: ClassVar[tuple[str, ...]] = ("prompt", "post", "text")

    source: str = "trl-lib/tldr"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""

    def split_text(self, text: str) -> tuple[str, dict[str, str]]:
        """Join title and post by a blank line. Other texts stay unchanged, except for a final ``TL;DR:``."""
        text = _TLDR.sub("", text)
        match = _POST.fullmatch(text)
        if match is None:
            return text, {}
        subreddit, title, post = match.groups()
        return f"{title}\n\n{post}".strip(), {"subreddit": subreddit} if subreddit else {}


class Arxiv(TextsPlugin):
    """Abstracts to write an introduction from, in the field ``abstract_text`` or ``abstract``."""

    name: ClassVar[str] = "arxiv"
    fields: ClassVar[tuple[str, ...]] = ("abstract_text", "abstract", "text")

    source: str = "OpenMLRL/arXiv_abstract"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or ``embedded``: twenty abstracts written for
    magrpo."""
    hub_test_split: str = "val"
    """Held-out split if ``source`` is a hub id. Empty: hold out ``test_frac`` of ``hub_split``."""

    @property
    def resolved_source(self) -> str:
        """The file or hub id to read."""
        return str(_ABSTRACTS) if self.source == "embedded" else self.source
