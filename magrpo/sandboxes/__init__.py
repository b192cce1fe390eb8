"""Sandboxes that run untrusted programs."""

from __future__ import annotations

TABLE = {
    "pool": "magrpo.sandboxes.pool:PoolSandbox",
}


class SandboxError(RuntimeError):
    """The sandbox cannot be opened, or failed repeatedly. A bad program never raises it."""
