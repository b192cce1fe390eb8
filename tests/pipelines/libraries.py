"""Imported by the process that commands are forked from, so that none of them loads these libraries again.

Prefect is not among them: it reads its variables when it is imported, and each command has its own.
"""

from __future__ import annotations

import gc

import PIL.Image

import pipelines.cli
import pipelines.commands.dry_run
import pipelines.commands.runs
import pipelines.commands.train  # noqa: F401

PIL.Image.init()  # its formats
gc.collect()
gc.freeze()  # what is loaded stays: nothing of it is looked at again by the collectors of the forked processes
