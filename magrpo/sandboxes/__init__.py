"""Sandboxes that run untrusted programs."""

TABLE = {"bubblewrap": "magrpo.sandboxes.bubblewrap:BubblewrapSandbox"}
