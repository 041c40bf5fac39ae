"""The first frame of a message to SGLang, byte for byte."""

import pickletools

import pytest

from encoder_contract.geometry import Grid
from prefill_client.sglang_gateway.frames import Modality, embedding_frame
from tests.sglang_messages import read_frame

GOLDEN = (
    b"\x80\x04csglang.srt.disaggregation.encoder.receiver\nEmbeddingData\n)\x81}("
    b"X\x06\x00\x00\x00req_idX\x0e\x00\x00\x00r_local_part_1X\x09\x00\x00\x00num_partsJ\x02\x00\x00\x00"
    b"X\x08\x00\x00\x00part_idxJ\x01\x00\x00\x00X\x08\x00\x00\x00grid_dim](](J\x01\x00\x00\x00J\x04\x00\x00\x00"
    b"J\x06\x00\x00\x00e](J\x01\x00\x00\x00J\x02\x00\x00\x00J\x02\x00\x00\x00ee"
    b"X\x08\x00\x00\x00modalitycsglang.srt.managers.schedule_batch\nModality\n(J\x01\x00\x00\x00tR"
    b"X\x09\x00\x00\x00embeddingNX\x09\x00\x00\x00send_timeNX\x05\x00\x00\x00dtypectorch\nbfloat16\n"
    b"X\x05\x00\x00\x00shape](J\x07\x00\x00\x00J\x00\x02\x00\x00eX\x07\x00\x00\x00_mr_ptrN"
    b"X\x09\x00\x00\x00error_msgNX\x0a\x00\x00\x00error_codeNub."
)


def frame(**other: object) -> bytes:
    fields = {"grids": [Grid(1, 4, 6), Grid(1, 2, 2)], "shape": (7, 512), "dtype": "bfloat16", **other}
    return embedding_frame("r_local_part_1", 2, 1, **fields)


def test_a_frame_is_byte_exact() -> None:
    assert frame() == GOLDEN


def test_a_frame_imports_three_names_and_calls_only_the_modality() -> None:
    opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(frame())]
    assert [argument for name, argument in opcodes if name == "GLOBAL"] == [
        "sglang.srt.disaggregation.encoder.receiver EmbeddingData",
        "sglang.srt.managers.schedule_batch Modality",
        "torch bfloat16",
    ]
    assert [name for name, _ in opcodes].count("REDUCE") == 1


def test_a_frame_unpickles_to_its_fields() -> None:
    data = read_frame(frame(modality=Modality.VIDEO, dtype="float32"))
    assert (data.req_id, data.num_parts, data.part_idx) == ("r_local_part_1", 2, 1)
    assert (data.grid_dim, data.shape, data.dtype) == ([[1, 4, 6], [1, 2, 2]], [7, 512], "float32")
    assert data.modality == Modality.VIDEO
    assert data.error_msg is data.error_code is data.embedding is None


@pytest.mark.parametrize("name", ["café_local_part_0", "a\nb", "x" * 300])
def test_a_request_id_survives_the_frame(name: str) -> None:
    assert read_frame(embedding_frame(name, 1, 0, grids=[], shape=(0, 1), dtype="float16")).req_id == name
