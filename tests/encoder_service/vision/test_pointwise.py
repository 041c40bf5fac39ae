"""Kernels between the products: each gives what its plain form does, and can be done without.

Without a GPU the kernels run in Triton's interpreter, whose own rounding to bfloat16 is towards zero: there they are
held to their plain forms in float16 and float32 strictly, in bfloat16 to one unit in the last place.
"""

import sys

import pytest
import torch

from encoder_contract.checkpoint import read_spec
from encoder_contract.geometry import Grid
from encoder_service.vision.load import make_pointwise
from encoder_service.vision.pointwise import Norm, PlainPointwise
from testing.reference_tower import random_patches, row_errors
from tests.towers import load

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

from encoder_service.vision.pointwise_triton import TritonPointwise, difference, ulps  # noqa: E402


@pytest.fixture(scope="module")
def folders(kept_checkpoint):
    return {kind: kept_checkpoint(kind, depth=2) for kind in ("qwen3_vl", "qwen2_5_vl")}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def spec(request, folders):
    return read_spec(folders[request.param])


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_equal(ours, plain):
    """Compare up to a unit in the last place, or what float32 loses when terms of size one cancel."""
    torch.testing.assert_close(ours, plain, rtol=2 * torch.finfo(plain.dtype).eps, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("width", [144, 640, 1152])
def test_sum_and_norm_equal_those_of_torch(spec, width, rms, dtype):
    norm = Norm(width, rms=rms).to(DEVICE, dtype)
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data = (1 - seed) + random(width, dtype=dtype, seed=seed) / 10
    residual, delta = 3 * random(5, width, dtype=dtype, seed=2) + 1, random(5, width, dtype=dtype, seed=3)
    ours, plain = TritonPointwise(spec, DEVICE), PlainPointwise()
    for added in (None, delta):
        one, other = residual.clone(), residual.clone()
        assert_equal(ours.add_norm(one, added, norm), plain.add_norm(other, added, norm))
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_and_rotation_in_place_equal_torch_and_leave_the_values_unchanged(spec, dtype):
    grid = Grid(1, 6, 10)
    packed = random(grid.patches, 3, spec.heads, spec.head_size, dtype=dtype)
    bias = random(2, spec.heads, spec.head_size, dtype=torch.float32, seed=1)
    rotated = []
    for form in (TritonPointwise(spec, DEVICE), PlainPointwise()):
        copy = packed.clone()
        queries_and_keys = copy[:, :2]
        form.rotate(queries_and_keys, bias, form.rotations(grid, spec).to(DEVICE), queries_and_keys)
        assert torch.equal(copy[:, 2], packed[:, 2])
        rotated.append(copy[:, :2])
    assert not torch.equal(rotated[0], packed[:, :2])
    assert_equal(*rotated)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_gelu_equals_torch_in_a_partial_last_block_too(spec, dtype):
    x = 3 * random(7, 301, dtype=dtype)
    assert_equal(TritonPointwise(spec, DEVICE).gelu_erf(x.clone()), PlainPointwise().gelu_erf(x))


@pytest.mark.cuda
def test_kernel_parity_in_bfloat16_is_a_unit_in_the_last_place_in_the_mean(spec):
    assert difference(spec, DEVICE, torch.bfloat16) == ""


@pytest.mark.parametrize(
    ("kernel", "wrong", "name"),
    [
        ("gelu_erf", lambda _, x: torch.relu(x), "GELU"),
        ("gelu_erf", lambda _, x: x * float("nan"), "GELU"),
        ("rotate", lambda *_: None, "rotation"),
    ],
)
def test_a_kernel_that_differs_is_named(spec, monkeypatch, kernel, wrong, name):
    monkeypatch.setattr(TritonPointwise, kernel, wrong)
    assert difference(spec, DEVICE, torch.float16) == name


def test_units_in_the_last_place_are_counted():
    one = torch.tensor([1.0, 4.0]).bfloat16()
    assert ulps(one, one) == 0
    assert ulps(torch.tensor([1.0078125, 4.03125]).bfloat16(), one) == 1


@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs Triton's interpreter")
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_a_tower_with_kernels_has_the_rows_of_the_plain_one(folders, model_type, monkeypatch):
    """Packed as on CUDA, in float32: checks that the tower calls the kernels with tensors that they accept."""
    monkeypatch.setattr("encoder_service.vision.layers.packing_available", lambda _: False)
    folder, grids = folders[model_type], [Grid(1, 8, 12), Grid(1, 6, 4)]
    tower = load(folder)
    patches = random_patches(grids, tower.spec.patch_values)
    plain = torch.cat(tower.encode(patches, grids))
    tower._pointwise = TritonPointwise(tower.spec, torch.device("cpu"))
    tower._tables.cache.clear()  # type: ignore[attr-defined]
    layout = tower._layout(grids)
    assert layout.rotations.shape == (120, 2)
    with torch.inference_mode():
        [rows] = tower._module([torch.cat(patches)], [layout])
    assert row_errors(rows, plain).max() <= 1e-5


@pytest.mark.cuda
def test_a_start_without_a_compiler_falls_back_to_torch_and_says_so(spec, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "encoder_service.vision.pointwise_triton", None)
    assert make_pointwise(spec, torch.device("cuda:0"), torch.bfloat16).name == "torch"
    assert "kernels between products: using torch's, because Triton's cannot be used" in caplog.text


def test_kernels_are_for_16_bit_types_on_cuda(spec, caplog):
    assert make_pointwise(spec, torch.device("cpu"), torch.bfloat16).name == "torch"
    assert make_pointwise(spec, torch.device("cuda:0"), torch.float32).name == "torch"
    assert not caplog.text


def test_a_side_beyond_the_table_of_angles_is_refused(spec):
    with pytest.raises(ValueError, match="no side may be longer than 16384 patches"):
        TritonPointwise(spec, DEVICE).rotations(Grid(1, 2, 16386), spec)
