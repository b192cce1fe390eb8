"""Compact answers of servers: every number arrives as it was, and missing bytes are noticed."""

from __future__ import annotations

import math

import msgspec
import pytest

from magrpo.engines import Completion
from magrpo.engines.compact_answers import CompactAnswer

LOGPS = [-0.1, -1 / 3, -9999.0]


def send(completion: Completion) -> CompactAnswer:
    data = msgspec.msgpack.encode(CompactAnswer.pack("helper.1.abc", ["7"], "stop", completion))
    return msgspec.msgpack.decode(data, type=CompactAnswer)


@pytest.mark.parametrize("support", [(), [[1, 5], [2], []]])
def test_a_completion_arrives_as_it_was(support: list[list[int]]) -> None:
    answer = send(Completion([5, 2, 150_000], LOGPS, support))
    assert (answer.model, answer.versions, answer.finish_reason) == ("helper.1.abc", ["7"], "stop")
    assert answer.unpack() == ([5, 2, 150_000], LOGPS, list(support))


def test_a_log_probability_that_is_no_number_stays_none() -> None:
    assert math.isnan(send(Completion([1], [math.nan])).unpack().logps[0])


def test_missing_bytes_are_noticed() -> None:
    answer = send(Completion([5, 2], [-1.0, -2.0], [[1, 5], [2]]))
    for name in ("token_ids", "logps", "support_ids"):
        for cut in (1, 4):
            broken = msgspec.structs.replace(answer, **{name: getattr(answer, name)[:-cut]})
            if (name, cut) != ("token_ids", 4):  # a whole id: the client compares the lengths
                with pytest.raises(ValueError, match=r"must be a multiple|a support of 3 ids"):
                    broken.unpack()
