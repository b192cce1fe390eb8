"""``python -m tests.benchmarks.measure credit CONFIG [KEY=VALUE...]``: a measurement that the docs quote.

It runs as commands of ``magrpo`` do: in the same environment, with the same messages for mistakes.
"""

import sys

from pipelines import cli

if __name__ == "__main__":
    cli.app.command("tests.benchmarks.credit:bench_credit", name="credit")
    sys.exit(cli.main())
