"""``python -m tests.benchmarks.measure credit|orchestration CONFIG [KEY=VALUE...]``: measurements that the docs quote.

They run as commands of ``magrpo`` do: in the same environment, with the same messages for mistakes.
"""

import sys

from pipelines import cli

if __name__ == "__main__":
    for name in ("credit", "orchestration"):
        cli.app.command(f"tests.benchmarks.{name}:bench_{name}", name=name)
    sys.exit(cli.main())
