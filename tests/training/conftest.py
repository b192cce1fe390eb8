"""Runs of these tests draw blank pictures, as those of ``tests/pipelines`` do."""

from tests.pipelines.conftest import _pictures  # noqa: F401  # a fixture that every test uses
