"""Measurements that the docs quote: ``python -m tests.benchmarks.measure credit|gateway CONFIG [KEY=VALUE...]``.

They run as commands of ``magrpo`` do: in the same environment, with the same messages for mistakes.
"""

import sys

from pipelines import cli

if __name__ == "__main__":
    for name in ("credit", "gateway"):
        cli.app.command(f"tests.benchmarks.{name}:bench_{name}", name=name)
    sys.exit(cli.main())
