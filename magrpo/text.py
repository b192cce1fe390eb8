"""Lone surrogates: halves of characters that Python and JSON allow in a text, and UTF-8 does not.

What enters a run from a file, a user or a service has them replaced; JSON that holds them all the same, of a plug-in,
is written with escapes and read back equal.
"""

import json
import re
from typing import Any, TypeVar

import msgspec

REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")
ValueT = TypeVar("ValueT")


def replace_surrogates(value: ValueT) -> ValueT:
    """A text, or plain JSON of lists and dicts, with U+FFFD for every lone surrogate."""
    found: Any = value
    if isinstance(value, str):
        found = _SURROGATE.sub(REPLACEMENT, value)
    elif isinstance(value, list):
        found = [replace_surrogates(item) for item in value]
    elif isinstance(value, dict):
        found = {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return found  # type: ignore[no-any-return]


def encode_json(value: Any) -> bytes:
    """``value`` as :mod:`msgspec` writes it; with escapes if it holds lone surrogates."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def decode_json(text: bytes, kind: type[ValueT]) -> ValueT:
    """The ``kind`` that a JSON text holds, lone surrogates kept, as escapes or as bytes.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is not JSON, or of another kind.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            tree = json.loads(text.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            raise error from None
        return msgspec.convert(tree, kind)
