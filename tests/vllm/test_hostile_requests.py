"""Requests that would end or corrupt an engine with a careless consumer: each fails alone."""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from encoder_contract.geometry import Grid
from testing.photos import photo
from testing.vllm_engine import VllmEngine, raw

TOLERANCE = 1e-5
IMAGE, OTHER = photo(200, 120, 1, "PNG"), photo(130, 170, 2, "PNG")


def grid_of(engine: VllmEngine, height: int, width: int) -> dict[str, Any]:
    """Return the right name with another grid."""
    return engine.named(IMAGE, image_embeds={"image_grid_thw": [1, height, width]})


def unexplained(engine: VllmEngine) -> dict[str, Any]:
    """Return the right identifier without its name, as whoever reads KV events has it."""
    part = engine.named(IMAGE)
    del part["name"]
    return part


def forged(engine: VllmEngine) -> dict[str, Any]:
    """Return the right name, which any caller who has the file can write, with an identifier of no key."""
    return engine.named(IMAGE, uuid="0" * 64)


def forged_inside(engine: VllmEngine) -> dict[str, Any]:
    part = engine.named(IMAGE)
    return {**part, "uuid": part["name"] + "0" * 64}


def of_another_key(engine: VllmEngine) -> dict[str, Any]:
    from prefill_client.vllm.image_name import ImageName, NameSigner

    part = engine.named(IMAGE)
    name = ImageName.from_hex(part["name"])
    assert name is not None
    return {**part, "uuid": NameSigner(bytes(32)).identifier(name)}


def of_another_image(engine: VllmEngine) -> dict[str, Any]:
    return engine.named(IMAGE, name=engine.named(OTHER)["name"])


def of_another_tenant(engine: VllmEngine) -> dict[str, Any]:
    """Return the name that a request with another `cache_salt` got."""
    from prefill_client.vllm.image_name import ImageName, producer_of, salt_of

    image = engine.image(IMAGE)
    producer = producer_of(engine.client.description, salt_of("", "another"))
    return engine.named(IMAGE, **engine.named_fields(ImageName(image.digest, image.grid, producer)))


def named_with_another_grid(engine: VllmEngine) -> dict[str, Any]:
    """Return what a broken middleware would send: a name with a grid that the service does not have."""
    from prefill_client.vllm.image_name import ImageName

    image = engine.image(IMAGE)
    other = Grid(1, image.grid.w, image.grid.h)
    name = ImageName(image.digest, other, engine.producer)
    return engine.named(IMAGE, **engine.named_fields(name), image_embeds={"image_grid_thw": list(other)})


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> str:
    """Return a tensor as callers send it."""
    file = io.BytesIO()
    torch.save(torch.ones(shape, dtype=dtype), file)
    return base64.b64encode(file.getvalue()).decode()


def embedded(modality: str, **data: Any) -> dict[str, Any]:
    """Return a part with these tensors instead of an image or a video."""
    kind = f"{modality}_embeds"
    return {"type": kind, kind: data, "uuid": f"{modality} of a caller"}


FRAME = {"video_grid_thw": [1, 4, 4], "timestamps": [1.0]}
PATCH_VALUES = 3 * 2 * 16**2
# The chat template of the test's checkpoint knows images alone: callers may write a video's place themselves.
PLACE = ([], ["<|vision_start|><|video_pad|><|vision_end|>"])
# What a caller may send in the place of an image or video, none of which vLLM itself refuses.
EMBEDDED: dict[str, dict[str, Any]] = {
    "a video without pixels": embedded("video", **FRAME),
    "embeddings of an image": embedded("image", image_grid_thw=[1, 4, 4], image_embeds=tensor(4, 512)),
    "embeddings of a wrong width": embedded("image", image_grid_thw=[1, 4, 4], image_embeds=tensor(4, 3)),
    "too few embeddings": embedded("image", image_grid_thw=[1, 4, 4], image_embeds=tensor(1, 512)),
    "embeddings of a video": embedded("video", **FRAME, video_embeds=tensor(4, 512)),
    "embeddings of a video of a wrong width": embedded("video", **FRAME, video_embeds=tensor(4, 3)),
    "pixels of a wrong width": embedded("image", image_grid_thw=[1, 4, 4], pixel_values=tensor(16, 7)),
    "too few pixels": embedded("image", image_grid_thw=[1, 4, 4], pixel_values=tensor(8, PATCH_VALUES)),
    "pixels with an odd grid": embedded(
        "image", image_grid_thw=[1, 1, 16], pixel_values=tensor(16, PATCH_VALUES)
    ),
    "pixels with a negative grid": embedded(
        "image", image_grid_thw=[1, -4, -4], pixel_values=tensor(16, PATCH_VALUES)
    ),
    "pixels with a grid of four numbers": embedded(
        "image", image_grid_thw=[1, 1, 4, 4], pixel_values=tensor(16, PATCH_VALUES)
    ),
    "pixels with a grid of fractions": embedded(
        "image", image_grid_thw=[1.0, 4.0, 4.0], pixel_values=tensor(16, PATCH_VALUES)
    ),
    "an image of two frames": embedded(
        "image", image_grid_thw=[2, 4, 4], pixel_values=tensor(32, PATCH_VALUES)
    ),
    "a video's pixels of a wrong width": embedded("video", **FRAME, pixel_values_videos=tensor(16, 7)),
}

HOSTILE: dict[str, Callable[[VllmEngine], dict[str, Any]]] = {
    "no name": lambda engine: engine.named(IMAGE, uuid=None),
    "an unknown name": lambda engine: engine.named(IMAGE, uuid="my-image"),
    "an identifier without its name": unexplained,
    "a forged identifier": forged,
    "a forged identifier that contains its name": forged_inside,
    "an identifier of another key": of_another_key,
    "the name of another image": of_another_image,
    "the name of another tenant": of_another_tenant,
    "a larger grid": lambda engine: grid_of(engine, 12, 16),
    "a smaller grid": lambda engine: grid_of(engine, 4, 4),
    "a transposed grid": lambda engine: grid_of(engine, *engine.image(IMAGE).grid[:0:-1]),
    "a grid that the service does not confirm": named_with_another_grid,
    "pixels with an identifier of ours": lambda engine: {**raw(OTHER), "uuid": engine.named(IMAGE)["uuid"]},
    "pixels with a name of ours": lambda engine: {
        **raw(OTHER),
        **{key: engine.named(IMAGE)[key] for key in ("uuid", "name")},
    },
}


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_callers_tensors_fail_only_its_request(engine: VllmEngine, kind: str) -> None:
    engine.forget()
    try:
        hostile = engine.start(["hostile ", *PLACE[kind.count("video")], EMBEDDED[kind]])
    except (ValueError, TypeError):
        return  # vLLM refuses it before its engine gets it
    assert engine.run(hostile)[hostile].reason == "error"
    assert engine.ask(["good"]).reason == "length"
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_request_fails_alone(engine: VllmEngine, kind: str) -> None:
    engine.submit(IMAGE, OTHER)
    engine.forget()
    good = engine.start(["good ", OTHER, IMAGE])
    hostile = engine.start(["hostile ", HOSTILE[kind](engine)])
    ended = engine.run(good, hostile)
    assert ended[hostile].reason == "error"
    assert ended[good].distance(engine.ask(["good ", OTHER, IMAGE], own=True)) <= TOLERANCE
    engine.assert_nothing_is_held()


def test_a_transposed_grid_does_not_poison_the_prefix_cache(engine: VllmEngine) -> None:
    engine.submit(IMAGE)
    engine.forget()
    text = "a long text before the image, so that blocks are cached " * 2
    hostile = engine.start([text, HOSTILE["a transposed grid"](engine), text])
    engine.run(hostile)
    assert engine.ask([text, IMAGE, text]).distance(engine.ask([text, IMAGE, text], own=True)) <= TOLERANCE


def test_an_identifier_that_contains_its_name_is_served(engine: VllmEngine) -> None:
    engine.submit(IMAGE)
    engine.forget()
    part = engine.named(IMAGE)
    identifier = part.pop("name") + part["uuid"]
    sealed = engine.start(["x", {**part, "uuid": identifier}])
    right = engine.ask(["x", IMAGE], own=True)
    assert engine.run(sealed)[sealed].distance(right) <= TOLERANCE


def test_a_failure_is_not_remembered(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher, late = engine.side._fetcher, photo(210, 120, 77, "PNG")
    with monkeypatch.context() as patched:
        patched.setattr(fetcher, "_settings", replace(fetcher._settings, grace_s=0.02))
        first = engine.start(["x", late])
        assert engine.run(first)[first].reason == "error", "it was not submitted"
    assert engine.ask(["x", late]).distance(engine.ask(["x", late], own=True)) <= TOLERANCE


def test_a_broken_image_fails_only_its_requests(engine: VllmEngine) -> None:
    whole = photo(300, 200, 5, "PNG")
    broken = whole[: len(whole) // 2]  # its header is sound
    engine.client.submit([broken])
    engine.submit(OTHER)
    doomed = [engine.start(["first", OTHER, broken]), engine.start(["second", broken])]
    good = engine.start(["third", OTHER])
    ended = engine.run(*doomed, good)
    assert [ended[each].reason for each in doomed] == ["error", "error"]
    assert ended[good].reason == "length"
    engine.assert_nothing_is_held()
