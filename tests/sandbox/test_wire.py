"""Frames arrive whole, within their cap and their deadline, or not at all."""

from __future__ import annotations

import math
import socket
import struct
from typing import Any

import pytest

from magrpo.sandboxes.jail import wire
from magrpo.sandboxes.jail.proxy import check_answer


@pytest.mark.parametrize(
    "answer",
    [None, [], [1, "ok", 1, [], 0], [False, "ok", 1, [], 0], [0, "fine", 1, [], 0], [0, ["ok"], 1, [], 0],
     [0, "ok", 1, [], -1], [0, "ok", 1, [], True], [0, "exception", "ValueError", [], 0], [0, "ok", 1, None, 0],
     [0, "exception", ["ValueError", 1], [], 0], [0, ["x"], None, None, 0], [0, "ok", 1, [[1]], 0]],
)  # fmt: skip
def test_malformed_answers_are_refused(answer: Any) -> None:
    with pytest.raises(wire.WireError):
        check_answer(answer, 0)
    assert check_answer([0, "ok", 1, [], 0], 0) == ["ok", 1, [], 0]


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b"\xff\xfe", b"1" * 5000, b"[" * 100_000])
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.parse_frame(body)


def exchange(data: bytes, cap: int, wait_s: float = 1.0) -> Any:
    """What a reader makes of ``data`` followed by the end of the stream."""
    near, far = socket.socketpair()
    with near:
        with far:
            far.sendall(data)
        return wire.FrameReader(near, cap).read_message(lambda: wait_s)


def test_frames() -> None:
    assert exchange(wire.frame_message({"a": [1]}), 100) == {"a": [1]}
    assert exchange(wire.frame_message(7), 100, wait_s=1e9) == 7
    with pytest.raises(wire.Closed):
        exchange(b"\x00\x00", 100)
    with pytest.raises(wire.Closed):
        exchange(b"\x00\x00\x00\x09[1]", 100)
    with pytest.raises(wire.TooLarge):
        exchange(struct.pack(">I", 101), 100)
    with pytest.raises(wire.Late):
        exchange(b"\x00\x00\x00\x09", 100, wait_s=-1.0)


def test_the_cap_is_on_all_frames_together() -> None:
    near, far = socket.socketpair()
    with near, far:
        reader = wire.FrameReader(near, 29)
        for _ in range(2):
            wire.send_message(far, "123456789")
        assert reader.read_message(lambda: 1.0) == "123456789"
        with pytest.raises(wire.TooLarge):
            reader.read_message(lambda: 1.0)


def test_non_finite_floats_travel() -> None:
    assert math.isnan(wire.parse_frame(b"NaN"))
    assert exchange(wire.frame_message(float("-inf")), 100) == float("-inf")
