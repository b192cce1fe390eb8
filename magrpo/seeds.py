"""Seeds derived from names, so that nothing random depends on order, batching or resuming."""

import hashlib
import json


def derive_seed(*parts: int | str | tuple[int, ...]) -> int:
    """A 63-bit seed that is a pure function of ``parts``."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
