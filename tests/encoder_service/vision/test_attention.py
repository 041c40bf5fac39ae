"""Attention: correct over packed segments; backends that are wrong, slow or cannot be replayed are refused."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from encoder_service.vision import attention
from encoder_service.vision.attention import (
    BACKENDS,
    PART_QUERIES,
    FlashAttention3,
    SegmentAttention,
    make_attention,
    why_not,
)
from encoder_service.vision.layers import Segments

CPU = torch.device("cpu")
HEAD_SIZES = [72, 80]


def test_attention_by_segments_equals_masked_attention():
    lengths = [5, 5, 3, 0, 7]
    query, key, value = torch.randn(3, 20, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    segments = Segments.of(lengths, CPU)
    assert segments.bounds.tolist() == [0, 5, 10, 13, 13, 20]
    mixed = SegmentAttention()(query, key, value, segments, 0.3)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    weights = scores.masked_fill(owner[:, None] != owner, float("-inf")).softmax(-1)
    torch.testing.assert_close(mixed, torch.einsum("hqk,khd->qhd", weights, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [PART_QUERIES, 2 * PART_QUERIES, 1600, 2500])
def test_a_long_segment_in_parts_has_the_bits_of_one_call(length, dtype):
    packed = torch.randn(length, 3, 3, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    calls: list[None] = []
    query, key, value = packed.unbind(1)
    segments = Segments.of([length], CPU)
    mixed = SegmentAttention()(query, key, value, segments, 0.1, lambda: calls.append(None))
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (query, key, value)), scale=0.1
    )
    assert torch.equal(mixed, whole[0].transpose(0, 1))
    parts = length // PART_QUERIES
    assert len(calls) == (parts * -(-3 // torch.get_num_threads()) if parts > 1 else 0)


class Backend:
    """A correct backend, in which a subclass makes one mistake."""

    name, graphs, persistent = "foreign", True, False

    def __call__(self, query, key, value, segments, scale):
        return SegmentAttention()(query, key, value, segments, scale)


class MixesSegments(Backend):
    def __call__(self, query, key, value, segments, scale):
        return super().__call__(query, key, value, Segments.of([len(query)], CPU), scale)


class IgnoresStrides(Backend):
    def __call__(self, *tensors_segments_scale):
        *tensors, segments, scale = tensors_segments_scale
        dense = torch.empty(tensors[0].shape).stride()
        query, key, value = (torch.as_strided(each, each.shape, dense) for each in tensors)
        return super().__call__(query, key, value, segments, scale)


class IgnoresScale(Backend):
    def __call__(self, query, key, value, segments, scale):
        return super().__call__(query, key, value, segments, 1.0)


class NanInShortSegments(Backend):
    def __call__(self, query, key, value, segments, scale):
        mixed = super().__call__(query, key, value, segments, scale)
        mixed[-1] = float("nan")
        return mixed


class Raises(Backend):
    def __call__(self, query, key, value, segments, scale):
        raise KeyError("sm_90")  # an unexpected type of error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_correct_backend_passes_its_trial(head_size, dtype):
    assert attention.trial_failure(Backend(), CPU, dtype, head_size) == ""


@pytest.mark.parametrize("wrong", [MixesSegments, IgnoresStrides, IgnoresScale, NanInShortSegments])
@pytest.mark.cuda
def test_a_backend_wrong_on_odd_strided_segments_is_refused(wrong):
    assert "the relative error of its rows is" in attention.trial_failure(wrong(), CPU, torch.bfloat16, 72)


@pytest.mark.cuda
def test_a_backend_that_raises_is_refused_with_its_message():
    assert attention.trial_failure(Raises(), CPU, torch.bfloat16, 72) == "KeyError: 'sm_90'"


def test_the_trial_has_odd_lengths_and_others_for_the_replay():
    for lengths in (attention.LENGTHS, attention.OTHER_LENGTHS):
        assert 0 in lengths
        assert any(length % 16 for length in lengths)
        assert sum(lengths) == sum(attention.LENGTHS)
    assert attention.LENGTHS != attention.OTHER_LENGTHS
    assert 1 in attention.LENGTHS


class Named(Backend):
    """A backend with a name, for the choice among several."""

    def __init__(self, name):
        self.name = name


def on_hopper(monkeypatch, reasons=()):
    """Choose a backend as on a GPU on which all backends run, except for those with a reason."""
    monkeypatch.setattr(attention, "build", Named)
    monkeypatch.setattr(attention, "why_not", lambda name, *_: dict(reasons).get(name, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    return make_attention("auto", torch.device("cuda"), torch.bfloat16, 8)


def test_auto_takes_the_first_backend_that_runs(monkeypatch):
    assert on_hopper(monkeypatch).name == "flash3"
    assert on_hopper(monkeypatch, {"flash3": "no", "varlen": "no"}).name == "flash2"
    with pytest.raises(ValueError, match=r"no attention runs on cuda in torch.bfloat16: .*'varlen': 'no'"):
        on_hopper(monkeypatch, dict.fromkeys(BACKENDS, "no"))


@pytest.mark.cuda
def test_hopper_without_flash_attention_3_causes_a_warning(monkeypatch, caplog):
    missing = {"flash3": "ImportError: none of fa3_fwd_interface is installed"}
    assert on_hopper(monkeypatch, missing).name == "varlen"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("not flash3" in line and "fa3_fwd_interface" in line for line in warnings)
    caplog.clear()
    on_hopper(monkeypatch)
    assert "not flash3" not in caplog.text


@pytest.mark.parametrize(
    ("installed", "operators"), [("fa3_fwd_interface", "fa3_fwd"), ("flash_attn_interface", "flash_attn_3")]
)
@pytest.mark.cuda
def test_flash_attention_3_has_two_builds_and_never_splits_keys(monkeypatch, installed, operators):
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="none of fa3_fwd_interface, flash_attn_interface is installed"):
        FlashAttention3()
    seen = {}

    def fwd(query, key, value, **options):
        seen.update(options)
        return query, None, None, None

    monkeypatch.setitem(sys.modules, installed, ModuleType(installed))
    monkeypatch.setattr(torch.ops, operators, SimpleNamespace(fwd=fwd), raising=False)
    query, key, value = torch.randn(3, 12, 2, 8).unbind()
    assert FlashAttention3()(query, key, value, Segments.of([12], CPU), 0.5) is query
    assert seen["num_splits"] == 1
    assert (seen["softmax_scale"], seen["max_seqlen_q"], seen["max_seqlen_k"]) == (0.5, 12, 12)
    assert seen["cu_seqlens_q"].tolist() == seen["cu_seqlens_k"].tolist() == [0, 12]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "sdpa"])
def test_a_forced_backend_that_cannot_run_is_an_error(name):
    with pytest.raises(ValueError, match=f"attention '{name}' cannot run here: it needs CUDA"):
        make_attention(name, CPU, torch.bfloat16, 72)


def test_a_backend_whose_library_is_missing_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "import of flash_attn halted" in why_not("flash2", torch.device("cuda"), torch.bfloat16)


@pytest.mark.cuda
def test_an_unknown_backend_is_refused_and_auto_logs_its_choice(caplog):
    with pytest.raises(ValueError, match=r"known: auto, flash3, .*sdpa"):
        make_attention("flash9", CPU, torch.float32, 72)
    with caplog.at_level("INFO"):
        assert make_attention("auto", CPU, torch.float32, 72).name == "sdpa"
    assert "attention: sdpa (auto" in caplog.text
