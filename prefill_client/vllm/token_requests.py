"""Requests of tokens (`/inference/v1/generate`): the images in what a render server has laid out.

A render server with our middleware lays out images from their identifiers and grids, and answers with these and no
pixels. An engine gets them as `mm_hashes` of the request's `features`, with the names in `ec_transfer_params`. It takes
nothing else from the caller: grids and numbers of rows follow from the names.

A request may instead have `content_parts`: images for placeholders in its tokens. vLLM expands these placeholders, but
takes no image without pixels there. They are therefore expanded here, and the images become features.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from encoder_contract.errors import ForbiddenError, InvalidRequestError
from encoder_contract.geometry import Geometry, Grid, rows_of_grid
from prefill_client.images import Image
from prefill_client.vllm.image_name import UNKNOWN_NAME, ImageName, NameSigner, RequestInfo
from prefill_client.vllm.request_images import NamedImage, check_parameters

_IMAGE = "image"
_PARAMETERS = "ec_transfer_params"


class TokenRequest:
    """The body of a request of tokens, and the named images in its features.

    Raises `ForbiddenError` for identifiers where no image can be, for those of another key, and for those without their
    name. Raises `InvalidRequestError` for an image with neither a name nor pixels, and for pixels whose placeholder
    would end vLLM's engine.
    """

    def __init__(self, body: Any, signer: NameSigner) -> None:
        self.body: dict[str, Any] = body if isinstance(body, dict) else {}
        self._features = _object(self.body.get("features"))
        self._signer = signer
        self.info = RequestInfo.read(self._parameters(), "")
        """What the render server's middleware said."""
        self.images: dict[int, ImageName] = {}
        """The names of images, by their indexes among those of the request."""
        self.has_pixels = False
        """Whether the engine's own tower encodes some of its media."""
        identifiers = list(self._identifiers())
        names = signer.names(self.info.images[: len(identifiers)])  # a caller may send a million
        unnamed: list[tuple[str, int]] = []
        for modality, index, identifier in identifiers:
            if not signer.is_identifier(identifier):
                unnamed.append((modality, index))
            elif modality != _IMAGE or (name := signer.name(identifier, names)) is None:
                raise ForbiddenError(f"{modality} {index}: {UNKNOWN_NAME}")
            else:
                self.images[index] = name
        if names and not self.images:
            raise ForbiddenError(f"image 0: {UNKNOWN_NAME}")
        for modality, index in unnamed:
            self._check_pixels(modality, index)

    def check(self, producer: bytes, geometry: Geometry) -> None:
        """Raise `ForbiddenError` for an image of another tenant or model.

        Raises `InvalidRequestError` for one whose placeholder has not a token for each row.
        """
        ranges = _items(self._features, "mm_placeholders")
        for index, name in self.images.items():
            if name.producer != producer:
                raise ForbiddenError(f"image {index}: {UNKNOWN_NAME}")
            rows = rows_of_grid(name.grid, geometry)
            # vLLM itself refuses a request with another number of ranges.
            if index < len(ranges) and _object(ranges[index]).get("length") != rows:
                raise InvalidRequestError(
                    f"image {index} has {rows} rows: its placeholder must have as many tokens"
                )

    def begins_with_image(self, tokens: int) -> bool:
        """Whether fewer than `tokens` tokens precede its first image, which has a name."""
        ranges = _items(self._features, "mm_placeholders")
        offset = _object(ranges[0]).get("offset") if ranges and 0 in self.images else None
        return isinstance(offset, int) and offset < tokens

    def write(self, info: RequestInfo) -> None:
        """Give vLLM the grid of each named image, nothing else that the caller says about it, and `info`."""
        hashes = _object(self._features.get("mm_hashes"))
        count = len(hashes[_IMAGE])
        grids = {index: grid_item(name.grid) for index, name in self.images.items()}
        for key, written in (("kwargs_data", {}), ("mm_metadata", grids)):
            items = _items(self._features, key) or [None] * count
            new = [written.get(index) if index in grids else item for index, item in enumerate(items)]
            others = {each: [None] * len(of) for each, of in hashes.items()}
            self._features[key] = {**others, **_object(self._features.get(key)), _IMAGE: new}
        self.body[_PARAMETERS] = self._parameters()
        _object(_object(self.body.get("sampling_params")).get("extra_args")).pop(_PARAMETERS, None)
        info.write(self.body)

    def _parameters(self) -> dict[str, Any]:
        """Return `ec_transfer_params`: beside the features, or where vLLM 0.31 and 0.32 put it."""
        sampling = _object(self.body.get("sampling_params"))
        inside = _object(_object(sampling.get("extra_args")).get(_PARAMETERS))
        return {**inside, **_object(self.body.get(_PARAMETERS))}

    def _identifiers(self) -> Iterator[tuple[str, int, str]]:
        for modality, hashes in _object(self._features.get("mm_hashes")).items():
            if not isinstance(hashes, list) or not all(isinstance(each, str) for each in hashes):
                raise InvalidRequestError(f"features.mm_hashes.{modality} must be a list of hashes")
            yield from ((modality, index, identifier) for index, identifier in enumerate(hashes))

    def _check_pixels(self, modality: str, index: int) -> None:
        items = _object(self._features.get("kwargs_data")).get(modality)
        item = items[index] if isinstance(items, list) and index < len(items) else None
        if not isinstance(item, str) or len(item) <= _GRID_CHARACTERS:
            raise InvalidRequestError(f"{modality} {index} has neither pixels nor a name")
        self.has_pixels = True
        ranges = _items(self._features, "mm_placeholders") if modality == _IMAGE else []
        place = _object(ranges[index]) if index < len(ranges) else {}
        offset, length = place.get("offset"), place.get("length")
        if not isinstance(offset, int) or not isinstance(length, int):
            return  # vLLM refuses it
        if 0 <= offset < len(self._run_ends) and offset + length > self._run_ends[offset]:
            raise InvalidRequestError(
                f"image {index}: a request of tokens cannot say which tokens of its placeholder have rows, and vLLM's "
                "engine would end, because they are not all the same (as for models with separators between tiles): "
                "send a chat instead"
            )

    @cached_property
    def _run_ends(self) -> list[int]:
        """For each token of the prompt, the index after the last of the equal tokens that follow it."""
        tokens = self.body.get("token_ids")
        tokens = tokens if isinstance(tokens, list) else []
        ends, end = [0] * len(tokens), len(tokens)
        for at in reversed(range(len(tokens))):
            if at + 1 < len(tokens) and tokens[at] != tokens[at + 1]:
                end = at + 1
            ends[at] = end
        return ends


class ContentParts:
    """The images of `content_parts`, in the form of `RequestImages`: the middleware names them alike."""

    has_options = loses_parameters = in_background = False
    previous_response = ""

    def __init__(
        self, body: dict[str, Any], image_token: int | None, geometry: Geometry, max_tokens: int
    ) -> None:
        """`image_token` is the placeholder of an image, and `max_tokens` what the longest prompt has."""
        check_parameters(body)
        self.body = body
        self._geometry = geometry
        self._max_tokens = max_tokens
        parts, tokens = body.get("content_parts"), body.get("token_ids")
        self._parts: list[Any] = parts if isinstance(parts, list) else []
        self._tokens: list[Any] = tokens if isinstance(tokens, list) else []
        self._image_token = image_token

    def __len__(self) -> int:
        """Return the number of images; 0 if there are other media, or other placeholders than one for each image."""
        is_image = [isinstance(each, dict) and each.get("type") == "image_url" for each in self._parts]
        fits = all(is_image) and self._tokens.count(self._image_token) == len(self._parts)
        return len(self._parts) if fits else 0

    def references(self) -> list[tuple[str, str]]:
        """Return the URL of each image and its `uuid`."""
        references = [(part.get("url") or "", part.get("uuid") or "") for part in self._parts]
        if not all(
            (url or uuid) and isinstance(url, str) and isinstance(uuid, str) for url, uuid in references
        ):
            raise InvalidRequestError("an image of content_parts has no url")
        return references

    def stored_as(self) -> str:
        """Return an empty id: no response is stored."""
        return ""

    def replace(self, replacements: Sequence[Sequence[str | NamedImage]], info: RequestInfo) -> None:
        """Expand each placeholder to the rows of its image, and make the images features."""
        named = [part for each in replacements for part in each if isinstance(part, NamedImage)]
        lengths = [rows_of_grid(Grid(*image.grid), self._geometry) for image in named]
        length = len(self._tokens) - len(named) + sum(lengths)
        if length > self._max_tokens:  # a placeholder of one token may stand for thousands
            raise InvalidRequestError(
                f"the prompt has {length} tokens with those of its images, and the model takes {self._max_tokens}"
            )
        remaining, ranges = iter(lengths), []
        tokens: list[int] = []
        for token in self._tokens:
            length = 1
            if token == self._image_token:
                length = next(remaining)
                ranges.append({"offset": len(tokens), "length": length})
            tokens += [token] * length
        self.body["token_ids"] = tokens
        self.body["features"] = {
            "mm_hashes": {_IMAGE: [image.identifier for image in named]},
            "mm_placeholders": {_IMAGE: ranges},
            "mm_metadata": {_IMAGE: [grid_item(Grid(*image.grid)) for image in named]},
        }
        del self.body["content_parts"]
        info.write(self.body)


def image_of(name: ImageName, geometry: Geometry, submitted_to: str) -> Image:
    """Return the image of a name, whose file another process has submitted."""
    rows = rows_of_grid(name.grid, geometry)
    return Image(b"", name.digest, name.grid, rows, name.frames, submitted_to=submitted_to)


@lru_cache(4096)
def grid_item(grid: Grid) -> str:
    """Return an image's grid as vLLM serializes it for an image whose rows come from elsewhere."""
    field = MultiModalBatchedField(keep_on_cpu=True)
    tensor = MultiModalFieldElem(data=torch.tensor(grid, dtype=torch.int64), field=field)
    return str(encode_mm_kwargs_item(MultiModalKwargsItem({"image_grid_thw": tensor})))


_GRID_CHARACTERS = len(grid_item(Grid(1, 1, 1)))
"""The length of a grid as vLLM serializes it, whatever its numbers. Any pixels are longer."""


def _items(features: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of the images under a key of the features."""
    items = _object(features.get(key)).get(_IMAGE)
    return items if isinstance(items, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
