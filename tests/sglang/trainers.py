"""Trainers that write weights into a running SGLang, in the ways that it offers over HTTP."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import httpx
import torch
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch import Tensor
from torch.distributed import broadcast, destroy_process_group

from testing.processes import free_port
from testing.sglang_engine import SglangEngine

Tensors = dict[str, Tensor]
Write = Callable[[SglangEngine, Tensors], None]
"""Writes tensors into an engine, by their names in a checkpoint."""
BUCKET = "flattened_bucket"
GROUP = "trainer"
TIMEOUT_S = 300.0


def post(engine: SglangEngine, route: str, **body: object) -> None:
    response = httpx.post(f"{engine.url}/{route}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text


@contextmanager
def session(engine: SglangEngine) -> Iterator[None]:
    post(engine, "begin_weight_update")
    yield
    post(engine, "end_weight_update")


def send(engine: SglangEngine, *by_rank: Tensors, load_format: str | None = None) -> None:
    """Write tensors from memory of this process, which each rank maps. `by_rank` has those of each rank."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    # Without it, only a child of this process could map them.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        sent = [_bucket(tensors) if load_format == BUCKET else [*tensors.items()] for tensors in by_rank]
        payloads = [MultiprocessingSerializer.serialize(each, output_str=True) for each in sent]
        with session(engine):
            post(
                engine,
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format=load_format,
            )
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def _bucket(tensors: Tensors) -> dict[str, object]:
    bucket = FlattenedTensorBucket(named_tensors=[*tensors.items()])
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


@contextmanager
def broadcasting(engine: SglangEngine, *, ranks: int = 1) -> Iterator[Write]:
    """Join a group of this process and the ranks of an engine, over gloo; yield how to write tensors through it."""
    port, size = free_port(), 1 + ranks
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            post,
            engine,
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=size,
            group_name=GROUP,
            backend="gloo",
        )
        group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            timeout=timedelta(seconds=TIMEOUT_S),
            world_size=size,
            rank=0,
            group_name=GROUP,
        )
        joined.result()

        def write(engine: SglangEngine, tensors: Tensors) -> None:
            with session(engine):
                loaded = pool.submit(
                    post,
                    engine,
                    "update_weights_from_distributed",
                    names=[*tensors],
                    dtypes=[str(each.dtype).removeprefix("torch.") for each in tensors.values()],
                    shapes=[[*each.shape] for each in tensors.values()],
                    group_name=GROUP,
                )
                for tensor in tensors.values():
                    broadcast(tensor.contiguous(), src=0, group=group)
                loaded.result()

        yield write
        post(engine, "destroy_weights_update_group", group_name=GROUP)
        destroy_process_group(group)
