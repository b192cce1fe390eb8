"""Completions as servers with magrpo's paths send them: numbers as little-endian bytes, a tenth of vLLM's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Self

import msgspec
import numpy as np

from magrpo.engines import Completion

ROUTES = "/inference/magrpo"
"""Where the paths of ``magrpo.engines.vllm_routes`` lie."""
COMPACT = f"{ROUTES}/generate"
"""Answers with a :class:`CompactAnswer`."""
_ID, _LOGP = "<i4", "<f8"


class CompactAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The completion of one request, and the name and versions of the weights that made it."""

    model: str
    versions: list[str]
    finish_reason: str
    token_ids: bytes
    logps: bytes
    support_sizes: bytes = b""
    """Number of ids in the support of each token; empty: it was not asked for."""
    support_ids: bytes = b""

    @classmethod
    def pack(cls, model: str, versions: list[str], finish_reason: str, completion: Completion) -> Self:
        """The answer that has ``completion``."""
        sizes = [len(ids) for ids in completion.support]
        ids = chain.from_iterable(completion.support)
        return cls(
            model,
            versions,
            finish_reason,
            _to_bytes(completion.token_ids, _ID),
            _to_bytes(completion.logps, _LOGP),
            _to_bytes(sizes, _ID),
            np.fromiter(ids, _ID, sum(sizes)).tobytes(),
        )

    def unpack(self) -> Completion:
        """Its completion. Raises ValueError if bytes are missing."""
        token_ids, logps, sizes, ids = (
            np.frombuffer(data, kind).tolist()
            for data, kind in (
                (self.token_ids, _ID),
                (self.logps, _LOGP),
                (self.support_sizes, _ID),
                (self.support_ids, _ID),
            )
        )
        if sum(sizes) != len(ids):
            raise ValueError(f"a support of {sum(sizes)} ids has {len(ids)}")
        ends = accumulate(sizes, initial=0)
        return Completion(token_ids, logps, [ids[begin:end] for begin, end in pairwise(ends)])


def _to_bytes(numbers: Sequence[float], kind: str) -> bytes:
    return np.asarray(numbers, kind).tobytes()
