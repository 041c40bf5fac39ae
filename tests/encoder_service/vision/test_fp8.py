"""FP8: which products are quantised and how, the error of rows, and addresses separate from full precision."""

import pytest
import torch

from encoder_contract.checkpoint import model_fingerprint
from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import full_blocks
from encoder_service.config import Config
from encoder_service.engine.model import load_model
from encoder_service.vision import load_tower
from encoder_service.vision.fp8 import Fp8Linear
from encoder_service.vision.layers import Linear
from encoder_service.vision.pointwise import FP8, FP8_MAX, PlainPointwise
from testing.reference_tower import ReferenceTower, random_patches, row_errors

DEPTH = 6
MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
GRIDS = [Grid(1, 8, 12), Grid(1, 16, 16)]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folders(kept_checkpoint):
    return {kind: kept_checkpoint(kind, depth=DEPTH, dtype=torch.bfloat16) for kind in MODEL_TYPES}


def load(folder, precision="fp8", dtype="bfloat16"):
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device="cpu", dtype=dtype, processor=processor, precision=precision)


def test_quantising_scales_each_row_to_the_fp8_maximum_and_keeps_zeros():
    x = torch.randn(5, 64)
    x[1] = 0
    x[2] *= 1e-20
    values, scales = PlainPointwise().quantised(x)
    assert values.dtype is FP8
    largest = values.float().abs().amax(dim=1)
    assert largest[[0, 3, 4]].tolist() == [FP8_MAX] * 3
    assert not values.float().isnan().any()
    assert values[1].float().tolist() == [0.0] * 64
    back = values.float() * scales[:, None]
    assert ((back - x).abs() <= 2**-4 * x.abs() + 2**-9 * scales[:, None]).all()


def test_a_product_is_that_of_the_quantised_values_in_float32():
    torch.manual_seed(0)
    product = Linear(96, 32)
    product.weight.data, product.bias.data = torch.randn(32, 96).bfloat16(), torch.randn(32).bfloat16()
    x = torch.randn(7, 96).bfloat16()
    ours = Fp8Linear(product, PlainPointwise())(x)
    assert ours.dtype is torch.bfloat16
    (a, a_scales), (b, b_scales) = (PlainPointwise().quantised(each) for each in (x, product.weight))
    exact = (a.double() * a_scales[:, None].double()) @ (b.double() * b_scales[:, None].double()).t()
    torch.testing.assert_close(ours, (exact + product.bias.double()).bfloat16(), rtol=2**-7, atol=1e-5)
    assert row_errors(ours, x.double() @ product.weight.double().t() + product.bias).max() > 1e-3


def test_two_fifths_of_the_published_towers_stay_in_full_precision():
    assert [full_blocks(depth) for depth in (27, 32)] == [11, 13]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_only_products_after_the_first_two_fifths_of_blocks_are_quantised(folders, model_type):
    module = load(folders[model_type])._module
    products = {name: part for name, part in module.named_modules() if isinstance(part, Linear)}
    quantised = {name for name, part in products.items() if isinstance(part, Fp8Linear)}
    later = {name for name in products if name.startswith("blocks.") and int(name.split(".")[1]) >= 3}
    assert quantised == later
    assert len(quantised) == 3 * (5 if model_type == "qwen2_5_vl" else 4)
    assert len(products) > len(quantised)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fp8_rows_meet_the_bar_and_differ_from_full_precision(folders, model_type):
    folder = folders[model_type]
    tower, reference = load(folder), ReferenceTower(folder, torch.float32)
    patches = random_patches(GRIDS, tower.spec.patch_values)
    truth = reference.rows(reference.pixels(patches), GRIDS)
    rows = torch.cat(tower.encode(patches, GRIDS))
    cosine = torch.cosine_similarity(rows.double(), truth.double())
    assert cosine.mean() >= 0.998
    assert cosine.min() >= 0.995
    full = torch.cat(load(folder, "full").encode(patches, GRIDS))
    assert row_errors(rows, truth).mean() > 2 * row_errors(full, truth).mean()


def test_quantised_rows_do_not_depend_on_their_neighbours_to_the_bit(folders):
    tower = load(folders["qwen3_vl"])
    patches = random_patches(GRIDS, tower.spec.patch_values)
    together = tower.encode(patches, GRIDS)
    for image, grid, rows in zip(patches, GRIDS, together, strict=True):
        assert torch.equal(rows, tower.encode([image], [grid])[0])


@pytest.mark.parametrize(("model_type", "alone"), [("qwen3_vl", 1), ("qwen2_5_vl", 2)])
def test_norms_and_gelus_are_quantised_in_one_pass_with_the_same_rows(
    folders, model_type, alone, monkeypatch
):
    """Only the output of attention and the inside of a gated MLP are quantised in a separate pass."""
    tower, calls = load(folders[model_type]), []

    class Counting(PlainPointwise):
        def quantised(self, x):
            calls.append("alone")
            return super().quantised(x)

        def add_norm_quantised(self, *given):
            calls.append("norm")
            return PlainPointwise().add_norm_quantised(*given)

        def gelu_tanh_quantised(self, x):
            calls.append("gelu")
            return PlainPointwise().gelu_tanh_quantised(x)

    patches = random_patches(GRIDS[:1], tower.spec.patch_values)
    rows = tower.encode(patches, GRIDS[:1])[0]
    tower._pointwise = Counting()
    for part in tower._module.modules():
        if isinstance(part, Fp8Linear):
            part._pointwise = tower._pointwise
    assert torch.equal(tower.encode(patches, GRIDS[:1])[0], rows)
    blocks = DEPTH - full_blocks(DEPTH)
    assert [calls.count(kind) for kind in ("alone", "norm", "gelu")] == [
        alone * blocks,
        2 * blocks,
        (2 - alone) * blocks,
    ]
    for name in ("norm_for", "gelu_tanh_for"):  # norms and GELUs as full-precision layers take them
        monkeypatch.setattr(Fp8Linear, name, getattr(Linear, name))
    assert torch.equal(tower.encode(patches, GRIDS[:1])[0], rows)


def test_another_element_type_than_bfloat16_is_refused(folders):
    with pytest.raises(ValueError, match="precision fp8 is for bfloat16"):
        load(folders["qwen3_vl"], dtype="float32")


def test_quantised_rows_have_their_own_fingerprint_and_addresses(folders):
    folder = folders["qwen3_vl"]
    recipes = {}
    for precision in ("full", "fp8"):
        config = Config(model=folder, devices="cpu", dtype="bfloat16", tower_precision=precision)
        recipes[precision] = load_model(config).recipe
        assert recipes[precision].model == model_fingerprint(folder, precision)
    assert recipes["full"].model == model_fingerprint(folder)
    addresses = {recipe.key(bytes(32)).address for recipe in recipes.values()}
    assert len(addresses) == 2
