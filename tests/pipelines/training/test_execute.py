"""The end of an attempt, however it ends."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from pipelines.training.execute import Timing, _record_status


def test_records_are_delivered_even_if_the_run_cannot_be_described() -> None:
    tracker, console = MagicMock(blocked_s=0.0), MagicMock(loading={})
    describe = MagicMock(side_effect=ValueError("a damaged evaluation"))
    with (
        pytest.raises(ValueError, match="damaged evaluation"),
        _record_status(tracker, describe, Timing(), console, 0.0),
    ):
        pass
    describe.assert_called_once_with("FINISHED")
    tracker.flush.assert_called_once_with()


@pytest.mark.parametrize(("first", "status"), [(KeyboardInterrupt, "KILLED"), (OSError, "FAILED")])
def test_what_fails_while_an_interrupted_run_closes_does_not_make_it_a_failed_one(
    first: type[BaseException], status: str
) -> None:
    tracker, describe = MagicMock(blocked_s=0.0), MagicMock()

    def close_twice() -> None:
        try:
            raise first
        finally:
            raise ValueError("closed twice")

    with (
        pytest.raises(ValueError, match="closed twice"),
        _record_status(tracker, describe, Timing(), MagicMock(loading={}), 0.0),
    ):
        close_twice()
    describe.assert_called_once_with(status)
