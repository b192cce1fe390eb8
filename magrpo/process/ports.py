"""Finds free TCP ports of this machine."""

import random
import socket
from contextlib import ExitStack, suppress

_PORTS = range(20_000, 32_768)
"""Ports to choose from: above those of Ray's workers, below those the kernel takes for outgoing connections."""


def find_free_ports(count: int) -> list[int]:
    """TCP ports at which nothing listens, drawn at random so that two processes rarely choose the same."""
    ports: list[int] = []
    with ExitStack() as probes:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):  # in use
                probe.bind(("", port))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")
    return ports
