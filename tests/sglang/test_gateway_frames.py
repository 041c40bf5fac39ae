"""The gateway's frames, read by the unpickler and the receiver of each supported release, taken from its wheel.

The code of a wheel is read as text: of its modules, only the definitions that read a message are run.
"""

import ast
import io
import pickle
import sys
import zipfile
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from encoder_contract.geometry import Grid
from prefill_client.sglang_gateway.frames import SUPPORTED, Modality, embedding_frame

RECEIVER = "sglang/srt/disaggregation/encoder/receiver.py"
UNPICKLER = "sglang/srt/utils/common.py"
CLASSES = ("sglang/srt/multimodal/modality.py", "sglang/srt/managers/schedule_batch.py")
# The receiver's functions that read a message, without those that need a server.
READING = {
    *("EmbeddingData", "MultiModalEmbeddingData", "_cat_grid", "_validate_embedding_part"),
    *("extract_original_req_id", "_resolve_embedding_part_request_id", "_embedding_part_matches_request"),
    *(
        "video_meta_attrs_for",
        "_aggregate_embedding_part",
        "_MODALITY_GRID_ATTRS",
        "_GENERAL_VIDEO_META_ATTRS",
    ),
    *("_GENERAL_IMAGE_META_ATTRS", "_MIMO_VIDEO_AUDIO_META_ATTRS", "_VIDEO_META_TENSOR_ATTRS"),
}


def definitions(wheel: zipfile.ZipFile, path: str, names: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions of these names in a module of a wheel, with the names that they use."""

    def defined(node: ast.stmt) -> set[str]:
        if isinstance(node, ast.Assign):
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        return (
            {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else set()
        )

    tree = ast.parse(wheel.read(path))
    kept = [node for node in tree.body if defined(node) & names]
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *kept], []), path, "exec"), given)
    return given


class Release:
    """What one release reads messages with."""

    def __init__(self, wheel: zipfile.ZipFile, monkeypatch: pytest.MonkeyPatch) -> None:
        enum = ast.parse("from enum import Enum, auto").body
        namespace: dict[str, Any] = {"__name__": "sglang.srt.managers.schedule_batch"}
        exec(compile(ast.Module(enum, []), "enum", "exec"), namespace)
        for path in CLASSES:
            if path in wheel.namelist():
                definitions(wheel, path, {"Modality"}, namespace)
        self.modality = namespace["Modality"]
        said: list[str] = []
        logger = SimpleNamespace(warning=lambda *told: said.append(str(told)))
        import itertools
        from collections import defaultdict

        names = {"torch": torch, "np": np, "defaultdict": defaultdict, "itertools": itertools}
        names |= {
            "Modality": self.modality,
            "logger": logger,
            "__name__": "sglang.srt.disaggregation.encoder.receiver",
        }
        self.receiver = definitions(wheel, RECEIVER, READING, names)
        self.dropped = said
        unpickling = {"pickle": pickle, "io": io, "_safe_load_torch_storage": None, "__name__": "common"}
        self.loads = definitions(wheel, UNPICKLER, {"SafeUnpickler", "safe_pickle_loads"}, unpickling)[
            "safe_pickle_loads"
        ]
        for name, attribute in (
            ("sglang.srt.managers.schedule_batch", ("Modality", self.modality)),
            ("sglang.srt.disaggregation.encoder.receiver", ("EmbeddingData", self.receiver["EmbeddingData"])),
        ):
            module = ModuleType(name)
            setattr(module, *attribute)
            for package in ("sglang", "sglang.srt", name.rpartition(".")[0]):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=SUPPORTED)
def release(
    request: pytest.FixtureRequest,
    wheels: Callable[[str], zipfile.ZipFile],
    monkeypatch: pytest.MonkeyPatch,
) -> Release:
    with wheels(request.param) as wheel:
        return Release(wheel, monkeypatch)


def frame(part: int, grids: list[Grid], rows: int, **other: Any) -> bytes:
    given = {"grids": grids, "shape": (rows, 8), "dtype": "float32", **other}
    return embedding_frame(f"r_local_part_{part}", 2, part, **given)


@pytest.mark.story("gateways")
def test_a_release_joins_the_parts_of_a_request(release: Release) -> None:
    whole = torch.arange(7 * 8, dtype=torch.float32).reshape(7, 8)
    parts = [(frame(0, [Grid(1, 4, 6)], 6), whole[:6]), (frame(1, [Grid(1, 2, 2)], 1), whole[6:])]
    together = None
    for first, rows in reversed(parts):
        said = release.loads(first)
        assert release.receiver["_embedding_part_matches_request"](said, "r"), release.dropped
        assert (said.error_msg, said.error_code) == (None, None)
        said.embedding = torch.frombuffer(bytearray(rows.numpy()), dtype=said.dtype).reshape(said.shape)
        together = release.receiver["_aggregate_embedding_part"](together, said, "qwen3_vl")
    assert together.ready
    assert torch.equal(together.get_embedding(is_concat=True)[release.modality.IMAGE], whole)
    assert together.get_mm_extra_meta()["img_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]


def test_a_release_joins_the_times_of_videos(release: Release) -> None:
    """Each part has the times of its videos, in order."""
    times, together = [[0.25, 1.5], [0.0]], None
    for part, own in enumerate((times, times[:1])):
        grids = [Grid(2, 4, 6), Grid(1, 2, 2)][: len(own)]
        first = frame(part, grids, 0, modality=Modality.VIDEO, times={"video_timestamps": own})
        said = release.loads(first)
        assert release.receiver["_embedding_part_matches_request"](said, "r"), release.dropped
        said.embedding = torch.zeros(0, 8)
        together = release.receiver["_aggregate_embedding_part"](together, said, "qwen3_vl")
    facts = together.get_mm_extra_meta()
    assert facts["video_timestamps"] == [*times, *times[:1]]
    assert facts["video_grid_thw"].tolist() == [[2, 4, 6], [1, 2, 2], [2, 4, 6]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
def test_a_release_reads_every_type_of_rows(release: Release, dtype: str) -> None:
    assert release.loads(frame(0, [], 0, dtype=dtype)).dtype is getattr(torch, dtype)


@pytest.mark.parametrize("modality", Modality)
def test_modalities_have_the_numbers_of_the_release(release: Release, modality: Modality) -> None:
    assert release.loads(frame(0, [], 0, modality=modality)).modality is release.modality[modality.name]


def test_a_frame_has_every_field_of_the_releases_class(release: Release) -> None:
    theirs = release.receiver["EmbeddingData"]("r", 1, 0, [], release.modality.IMAGE)
    assert vars(release.loads(frame(0, [], 0))).keys() == vars(theirs).keys()


def test_a_release_blocks_a_name_that_is_not_on_its_list(release: Release) -> None:
    with pytest.raises(RuntimeError, match="Blocked"):
        release.loads(b"\x80\x04cos\nsystem\n.")
