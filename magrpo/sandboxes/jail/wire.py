"""Frames: a length (4 bytes, big endian) and that many bytes of ASCII JSON. ``values.py`` describes their contents.

Nothing is unpickled or evaluated, and the reader limits sizes.
"""

import json
import select
import struct
import time
from collections.abc import Callable
from socket import socket
from typing import Any

HEADER = struct.Struct(">I")
MAX_WAIT_S = 2_000_000.0
"""The longest wait in seconds: poll and sockets count milliseconds, up to 2**31."""


class WireError(Exception):
    """The received bytes are not a frame, or not a value."""


class TooLarge(WireError):
    """A value or a frame exceeds the size limit."""


class Closed(WireError):
    """The other side hung up."""


class Late(WireError):
    """No frame arrived before the deadline."""


def parse_small_int(digits: str) -> int:
    if len(digits) > 17:
        raise ValueError("integer out of range")
    return int(digits)


ENCODER = json.JSONEncoder(separators=(",", ":"))
DECODER = json.JSONDecoder(parse_int=parse_small_int)


def frame_message(message: Any) -> bytes:
    body = ENCODER.encode(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def parse_frame(body: bytes) -> Any:
    """Parse the body of a frame; WireError if it is not JSON, is too deep, or has a large integer not in hex."""
    try:
        return DECODER.decode(body.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"malformed frame: {type(error).__name__}") from None


def send_message(channel: socket, message: Any) -> None:
    channel.sendall(frame_message(message))


class FrameReader:
    """Reads frames from a stream socket, at most ``cap`` bytes in all; rejects a longer frame by its header."""

    def __init__(self, channel: socket, cap: int) -> None:
        self.channel = channel
        self.left = cap
        self.received = bytearray()  # bytes after the last message
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)

    def read_message(self, wait: Callable[[], float | None]) -> Any:
        """Return the next message. ``wait()`` returns the seconds to wait next: None: forever; 0 or less: give up.

        Raises:
            Late: ``wait()`` gave up. Closed: end of file. TooLarge, WireError: the other side broke the rules.
        """
        (size,) = HEADER.unpack(self._take(HEADER.size, wait))
        if size + HEADER.size > self.left:
            raise TooLarge("more output than the limit allows")
        self.left -= size + HEADER.size
        return parse_frame(self._take(size, wait))

    def _take(self, size: int, wait: Callable[[], float | None]) -> bytes:
        while len(self.received) < size:
            seconds = wait()
            if seconds is not None and seconds <= 0:
                raise Late("no answer in time")
            if not self.poll.poll(None if seconds is None else min(seconds, MAX_WAIT_S) * 1000 + 1):
                continue
            try:
                piece = self.channel.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                raise Closed("the other side is gone")
            self.received += piece
        taken = bytes(self.received[:size])
        del self.received[:size]
        return taken


def wait_until(deadline: float) -> Callable[[], float]:
    """Return a ``wait`` for :meth:`FrameReader.read_message`, until ``time.monotonic()`` reaches ``deadline``."""
    return lambda: deadline - time.monotonic()
