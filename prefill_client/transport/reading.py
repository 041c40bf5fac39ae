"""Reading: using rows where they lie, and fetching them again when they were lost meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from encoder_contract.errors import StaleHandleError
from prefill_client.images import FetchedRows

Result = TypeVar("Result")

# What reads rows: it is given them in place, may be called again with the same rows fetched anew, and returns nothing
# that still lies where they do.
Use = Callable[[Sequence[FetchedRows]], Result]


async def read(rows: Sequence[FetchedRows], use: Use[Result], executor: Executor | None = None) -> Result:
    """Return `use(rows)`, called in a worker thread with the rows in place.

    What it returns counts only if the rows are found to be the same afterwards; else they are fetched again and it is
    called once more. Raises the error of rows that failed, now or when fetched again.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.run_in_executor(executor, partial(use_in_place, rows, use))
        except StaleHandleError as error:
            rows = await asyncio.gather(*again(rows, error))


def use_in_place(rows: Sequence[FetchedRows], use: Use[Result]) -> Result:
    """Return `use(rows)`, called with the rows in place; raise `StaleHandleError` when they were lost meanwhile."""
    for each in rows:
        if each.error is not None:
            raise each.error
    with ExitStack() as held:
        return use([held.enter_context(each.in_place()) for each in rows])


def again(rows: Sequence[FetchedRows], error: StaleHandleError) -> list[Awaitable[FetchedRows]]:
    """Return what fetches the lost ones of `rows` again, and the others as they are; raise `error` if none can be."""
    if not any(each.lost and each.again for each in rows):
        raise error
    return [each.again() if each.lost and each.again else _as_it_is(each) for each in rows]


async def _as_it_is(rows: FetchedRows) -> FetchedRows:
    return rows
