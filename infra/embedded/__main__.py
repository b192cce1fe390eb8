"""Runs :func:`infra.embedded.command.main`."""

import sys

from magrpo.process.environment import prepare_environment

if __name__ == "__main__":
    prepare_environment()
    from infra.embedded.command import main  # torch and others, which read the environment when they are imported

    sys.exit(main())
