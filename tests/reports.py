"""Keeps a run of pytest alive when the report of a failed test cannot be made.

Before 3.11.5, CPython's `ast` may raise `SystemError` when several threads use it, and pytest parses the source of a
failed test while the test's servers still run. Without this hook, that ends the run or its worker.
"""

import traceback
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Return pytest's report, or one with Python's plain traceback if pytest's cannot be made."""
    try:
        return (yield)
    except Exception as error:  # noqa: BLE001 (whatever it is, the other tests must run)
        assert call.excinfo is not None
        plain = "".join(traceback.format_exception(call.excinfo.value))
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=f"pytest made no report: {error!r}\n\n{plain}",
            when=call.when,
            duration=call.duration,
            start=call.start,
            stop=call.stop,
        )
