"""Reading the rows of a data set from a local file or the hub, and splitting problems into train and test."""

import ast
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magrpo.errors import MAX_QUOTED, ConfigError, quote_error, quote_value
from magrpo.files.hub import check_cached
from magrpo.files.paths import expand_home
from magrpo.python_source import MAX_DEPTH, check_depth, parse_python
from magrpo.seeds import derive_seed
from magrpo.text import replace_surrogates
from magrpo.types import Problem, Split

MAX_CHARS = 4_000_000
"""Longest text of a problem, in characters: about a million tokens."""
MAX_ASSERTS = 10_000
"""Largest number of asserts in a text: the sandbox reports no more cases."""
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_FORMS = f"give a {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file"


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row of a data set. ``where`` is ``file:line`` or ``file:row``, for messages."""

    where: str
    values: dict[str, Any]

    def read_text(self, *names: str) -> str:
        """The text in the first of ``names`` that the row has; ConfigError if there is none, or it is not a text."""
        for name in names:
            if name in self.values:
                if isinstance(self.values[name], str):
                    return str(self.values[name])
                raise ConfigError(f"{self.where}: field {name!r} must be a string, not {self.values[name]!r:.60}")
        wanted = " or ".join(repr(name) for name in names)
        fields = f"{', '.join(self.values) or 'none':.{MAX_QUOTED}}"
        raise ConfigError(f"{self.where}: has no field {wanted}; its fields are {fields}")

    def check_size(self, field: str, text: str) -> None:
        """Raise ConfigError if a text of a problem is too long, or has more asserts than the sandbox reports."""
        for number, limit, noun in (
            (len(text), MAX_CHARS, "characters"),
            (text.count("assert "), MAX_ASSERTS, "asserts"),
        ):
            if number > limit:
                raise ConfigError(
                    f"{self.where}: field {field!r} has {number:,} {noun}; at most {limit:,} are supported"
                )

    def read_texts(self, name: str) -> list[str]:
        """The texts of a field; empty if the field is absent, ConfigError if the value is not a list of texts."""
        values = self.values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self.where}: field {name!r} must be a list of strings, not {values!r:.60}")
        return values

    def parse_python(self, field: str, code: str) -> ast.Module:
        """Parse ``code``, the text of ``field`` or a part of it; ConfigError with row and line if it is not Python."""
        self.check_size(field, code)
        try:
            tree = parse_python(code)
            check_depth(tree, MAX_DEPTH)
            return tree
        except SyntaxError as error:
            reason = error.msg if error.lineno is None else f"{error.msg} (line {error.lineno})"
            raise ConfigError(f"{self.where}: field {field!r} is not Python: {reason}") from None


def read_rows(source: str, split: str) -> list[DatasetRow]:
    """Read all rows of ``source``: a file, a file of a hub data set (``owner/name:file``), or ``split`` of a hub id.

    Raises:
        ConfigError: there is no such file or data set, it is empty, or a line is not a JSON object.
    """
    path = expand_home(source)
    if _is_hub_file(source):
        path = _download_file(*source.split(":", 1))
    if path.is_file():
        rows = list(read_file_rows(path))
    else:
        check_source(source)
        rows = list(_load_hub_split(source, split))
    if not rows:
        raise ConfigError(f"{source}: contains no rows")
    return rows


def is_single_file(source: str) -> bool:
    """Whether a source is a file, here or in a hub data set, and has no splits of its own."""
    return expand_home(source).is_file() or _is_hub_file(source)


def _is_hub_file(source: str) -> bool:
    repository, _, name = source.partition(":")
    return bool(name) and repository.count("/") == 1 and not expand_home(source).exists()


def check_source(source: str) -> None:
    """Raise ConfigError if ``source`` is neither an existing file nor written like a hub id."""
    path = expand_home(source)
    repository, _, name = source.partition(":")
    may_be_hub_id = repository.count("/") == 1 and not source.startswith((".", "/", "~"))
    is_missing_file = not name and source.endswith(_SUFFIXES)  # ``data/mine.jsonl`` also looks like a hub id
    if not path.is_file() and (is_missing_file or not may_be_hub_id):
        raise ConfigError(f"{source}: no such file; {_FORMS}, or a hub id like owner/name")


def read_file_rows(path: Path) -> Iterator[DatasetRow]:
    """Yield the rows of a ``.parquet`` file, or the objects of JSON lines or an array; ``.gz`` files are compressed.

    Raises ConfigError, with the line, if the file or one of its lines cannot be read.
    """
    return _read_parquet(path) if path.suffix == ".parquet" else _read_json_rows(path)


def _read_json_rows(path: Path) -> Iterator[DatasetRow]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(
            path, "rt", encoding="utf-8-sig", errors="surrogatepass"
        ) as file:
            if path.name.removesuffix(".gz").endswith(".json"):
                values = _parse_json(path, file.read())
                if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
                    remedy = "for one object a line name the file .jsonl"
                    raise ConfigError(f"{path}: is not a JSON array of objects; {remedy}")
                yield from _number_rows(path, values)
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                values = _parse_json(path, line.rstrip(), number)
                if not isinstance(values, dict):
                    remedy = 'every line must be one, like {"task_id": ...}'
                    raise ConfigError(f"{path}:{number}: is not a JSON object; {remedy}")
                yield DatasetRow(f"{path}:{number}", values)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}{_hint_form(path)}") from None


def _hint_form(path: Path, text: str = "") -> str:
    """How to name or write a file whose ``text`` is not what its name says; empty if that is not the cause."""
    if not path.name.endswith(_SUFFIXES):
        return f"; {_FORMS}"
    is_array = path.name.removesuffix(".gz").endswith(".jsonl") and text.startswith("[")
    return "; if the file is one array, name it .json" if is_array else ""


def _parse_json(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return replace_surrogates(json.loads(text))
    except json.JSONDecodeError as error:
        where = f"{path}:{first_line + error.lineno - 1}"
        raise ConfigError(f"{where}: is not JSON: {error.msg} (column {error.colno}){_hint_form(path, text)}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nested too deep
        raise ConfigError(f"{path}:{first_line}: cannot be read as JSON: {quote_error(error)}") from None


def _number_rows(source: object, values: Iterable[Any]) -> Iterator[DatasetRow]:
    return (DatasetRow(f"{source}:row {number}", dict(value)) for number, value in enumerate(values, start=1))


def _read_parquet(path: Path) -> Iterator[DatasetRow]:
    from pyarrow import ArrowException, parquet  # defers pyarrow

    try:
        return _number_rows(path, parquet.read_table(path).to_pylist())
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {quote_error(error)}") from None


def _download_file(repository: str, name: str) -> Path:
    check_cached(repository, name)
    from huggingface_hub import hf_hub_download  # defers huggingface_hub

    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset"))
    except (OSError, ValueError) as error:
        message = f"cannot be downloaded from the hub: {error}; give the path of a local copy"
        raise ConfigError(f"{repository}:{name}: {message}") from None


def _load_hub_split(name: str, split: str) -> Iterator[DatasetRow]:
    check_cached(name)
    from datasets import load_dataset  # defers datasets
    from datasets.exceptions import DatasetGenerationError

    config = "sanitized" if name.endswith("/mbpp") else None
    try:
        return _number_rows(name, load_dataset(name, config, split=split))
    # FileNotFoundError: no such data set, or no files that can be read; RuntimeError: has a script.
    except (FileNotFoundError, ConnectionError, RuntimeError, ValueError) as error:
        if str(error).startswith("Unknown split"):  # this error has no class of its own
            remedy = "set problems.hub_split (of texts also problems.hub_test_split)"
            raise ConfigError(f"{name}: has no split {split!r}: {str(error).rstrip('.')}; {remedy}") from None
        message = f"it cannot be downloaded from the hub: {error}; give the path of a local copy"
        raise ConfigError(f"{name}: no such file, and {message}") from None
    except DatasetGenerationError as error:
        reason = quote_error(error.__cause__ or error)
        raise ConfigError(f"{name}: its files cannot be read: {reason}; give the path of a local copy") from None


def one_line(text: str) -> str:
    """Join the words of a text by single spaces, so that texts that differ only in white space become equal."""
    return " ".join(text.split())


def split_by_hash(problems: Sequence[Problem], test_frac: float, source: str) -> dict[Split, list[Problem]]:
    """Split problems into ``train`` and ``test`` by a hash of the prompt without white space, keeping their order.

    Problems with equal prompts are always in the same split, whatever their ids, tests and places in the file. The
    held-out share can then exceed ``test_frac``, by less than one group of such problems.

    Raises:
        ConfigError: a ``task_id`` occurs twice, or a split would be empty.
    """
    counts = Counter(problem.task_id for problem in problems)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ConfigError(f"{source}: task_id {quote_value(twice)} occurs more than once; splits need unique ones")
    number = round(test_frac * len(problems))
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(one_line(problem.prompt), []).append(problem.task_id)
    held_out: set[str] = set()
    for content in sorted(alike, key=lambda content: derive_seed("split", content)):
        if len(held_out) < number:
            held_out.update(alike[content])
    if not 0 < len(held_out) < len(problems):
        raise ConfigError(
            f"problems.test_frac: {test_frac} of {len(problems)} problems leaves a split empty; choose another fraction"
        )
    return {
        "train": [problem for problem in problems if problem.task_id not in held_out],
        "test": [problem for problem in problems if problem.task_id in held_out],
    }
