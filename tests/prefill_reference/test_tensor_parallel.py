"""Rows on every rank: two real processes on gloo, one Fetch, handles through the broadcast."""

import json
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from encoder_contract.errors import EncoderError
from encoder_service.api import admin_client as operator_client
from prefill_client import TRANSPORTS, BlockingClient, FetchedRows, RowRequest
from prefill_reference.tensor_parallel import pack, rows_on_every_rank
from testing.photos import photo
from tests.processes import running
from tests.waiting import START_S

RANKS = 2
IMAGES = [photo(300, 200, 41), photo(128, 400, 42), photo(64, 64, 43)]
Report = dict[str, Any]


def entered(outcomes: Sequence[FetchedRows] | None) -> Report:
    with rows_on_every_rank(outcomes) as rows:
        return {
            "sums": [float(each.double().sum()) for each in rows],
            "shapes": [list(r.shape) for r in rows],
        }


def fetched(
    endpoint: str, use: Callable[[list[FetchedRows]], Report], transports: Sequence[str] = TRANSPORTS
) -> Report:
    """On rank 0: fetch, and hold the Fetch open while the ranks read."""
    with BlockingClient.connect(endpoint) as client:
        submitted = client.submit(IMAGES)
        with client.fetch(
            [RowRequest(image.digest) for image in submitted], transports=transports
        ) as outcomes:
            return use(sorted(outcomes, key=lambda outcome: outcome.index))


def from_handles(rank: int, endpoint: str) -> Report:
    if rank:
        return entered(None)
    return fetched(
        endpoint,
        lambda outcomes: {
            **entered(outcomes),
            "packed_bytes": len(pack(outcomes)),
            "sent": [float(outcome.tensor().double().sum()) for outcome in outcomes],
        },
    )


def from_bytes(rank: int, endpoint: str) -> Report:
    return entered(None) if rank else fetched(endpoint, entered, ["inline"])


def with_a_failed_image(rank: int, endpoint: str) -> Report:
    def with_error(outcomes: list[FetchedRows]) -> Report:
        with (
            BlockingClient.connect(endpoint) as client,
            client.fetch([RowRequest(b"\2" * 32)], grace_ms=0) as more,
        ):
            return entered([*outcomes, *more])

    return entered(None) if rank else fetched(endpoint, with_error)


def with_a_stale_handle(rank: int, endpoint: str) -> Report:
    def stale(outcomes: list[FetchedRows]) -> Report:
        gone = copy(outcomes[1].rows)
        assert gone.handle
        gone.handle = replace(gone.handle, generation=gone.handle.generation + 1)
        return entered([outcomes[0], replace(outcomes[1], rows=gone), outcomes[2]])

    return entered(None) if rank else fetched(endpoint, stale)


def lost_in_the_block(rank: int, endpoint: str) -> Report:
    """The call that holds the rows ends while the ranks read, and the server reuses their pages."""
    if rank:
        with rows_on_every_rank(None) as rows:
            dist.barrier()
            return {"read": len(rows)}
    with BlockingClient.connect(endpoint) as client:
        fetch = client.fetch([RowRequest(image.digest) for image in client.submit(IMAGES)])
        with rows_on_every_rank(list(fetch)) as rows:
            fetch.close()
            while " 0 pins" not in operator_client.run("stats", endpoint):
                time.sleep(0.05)
            operator_client.run("flush", endpoint)
            dist.barrier()
            return {"read": len(rows)}


def failing_in_the_block_on_rank_1(rank: int, endpoint: str) -> Report:
    if rank == 0:
        return fetched(endpoint, entered)
    with rows_on_every_rank(None):
        raise RuntimeError("rank 1 ran out of memory")


def rank_main(rank: int, case: Callable[[int, str], Report], endpoint: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", timedelta(seconds=START_S), world_size=RANKS, rank=rank
    )
    (folder / f"{rank}.json").write_text(json.dumps(case(rank, endpoint)))
    dist.destroy_process_group()


def on_ranks(case: Callable[[int, str], Report], endpoint: str, folder: Path) -> list[Report]:
    folder.mkdir()
    spawn = get_context("spawn")
    processes = [
        spawn.Process(target=rank_main, args=(rank, case, endpoint, folder)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(START_S)
        if process.is_alive():
            process.kill()
            pytest.fail("a rank hangs")
        assert process.exitcode == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def reports(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """The results of each rank in each case. The cases share two processes, which take seconds to start."""
    folder = tmp_path_factory.mktemp("ranks")
    with running(checkpoint) as server:
        ranks = on_ranks(every_case, server.endpoint, folder / "run")
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def every_case(rank: int, endpoint: str) -> Report:
    found: Report = {}
    for case in (
        from_handles,
        from_bytes,
        with_a_failed_image,
        with_a_stale_handle,
        lost_in_the_block,
        failing_in_the_block_on_rank_1,
    ):
        try:
            found[case.__name__] = case(rank, endpoint)
        except (EncoderError, RuntimeError) as error:
            found[case.__name__] = {"error": type(error).__name__, "text": str(error)}
    return found


def test_every_rank_reads_the_rows_that_rank_0_fetched(reports: dict[str, list[Report]]) -> None:
    first, second = reports["from_handles"]
    assert first["sums"] == second["sums"] == first["sent"]
    assert first["shapes"] == second["shapes"]
    assert len(first["shapes"]) == len(IMAGES)


def test_a_handle_is_a_few_hundred_bytes_for_any_image(reports: dict[str, list[Report]]) -> None:
    assert reports["from_handles"][0]["packed_bytes"] < 300 * len(IMAGES)


def test_inline_rows_are_broadcast_themselves(reports: dict[str, list[Report]]) -> None:
    assert reports["from_bytes"][1] == reports["from_bytes"][0]
    assert reports["from_bytes"][1]["sums"] == reports["from_handles"][1]["sums"]


def test_an_image_that_failed_raises_its_error_on_every_rank(reports: dict[str, list[Report]]) -> None:
    assert [report["error"] for report in reports["with_a_failed_image"]] == ["UnknownImageError"] * RANKS


def test_a_stale_handle_raises_on_every_rank(reports: dict[str, list[Report]]) -> None:
    assert [report["error"] for report in reports["with_a_stale_handle"]] == ["StaleHandleError"] * RANKS


def test_rows_that_are_lost_in_the_block_raise_on_every_rank(reports: dict[str, list[Report]]) -> None:
    assert [report["error"] for report in reports["lost_in_the_block"]] == ["StaleHandleError"] * RANKS


def test_a_rank_that_fails_in_the_block_ends_it_for_all(reports: dict[str, list[Report]]) -> None:
    assert [report["error"] for report in reports["failing_in_the_block_on_rank_1"]] == [
        "UnavailableError",
        "RuntimeError",
    ]
