"""What the gateway checks about the encoder service at start: its model's family, and SGLang's own checkpoint."""

from collections.abc import Iterator
from pathlib import Path

from encoder_contract.checkpoint import model_fingerprint, read_config
from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from prefill_client import Description
from prefill_client.sglang_gateway.frames import SUPPORTED

SERVED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose architectures SGLang accepts with `--language-only`, in every supported release."""

# Patches along each side of a row, for all of `SERVED`. A service that counts rows does not report it.
MERGE_SIZE = 2

_REFUSED = {
    "kimi_k25": "SGLang runs it with code from the checkpoint, the encoder service with that of transformers, and the"
    " rows of the two were not compared",
    **dict.fromkeys(
        ("glm5_next", "minimax_m3_vl", "muse_spark"),
        "its rows were not compared with those of SGLang's own tower",
    ),
}
_NOT_ACCEPTED = f"SGLang {SUPPORTED[0]} to {SUPPORTED[-1]} does not start with --language-only for this model"


def check_family(description: Description) -> None:
    """Raise `ModelMismatchError`, with the reason, if the gateway does not serve the service's model."""
    model_type = description.model_type
    if model_type not in SERVED:
        raise ModelMismatchError(
            f"the gateway cannot serve {model_type!r}, the model of {description.model_name}:"
            f" {_REFUSED.get(model_type, _NOT_ACCEPTED)}. It serves {', '.join(SERVED)}; docs/models.md names the"
            " engines for other models"
        )


def grid_of_patches(grid: Grid, description: Description) -> Grid:
    """Return an image's grid in patches, as SGLang expects it. A service that counts rows reports a grid of rows."""
    if description.geometry is not None:
        return grid
    return Grid(grid.t, grid.h * MERGE_SIZE, grid.w * MERGE_SIZE)


def check_model(folder: Path, description: Description) -> None:
    """Compare the service with the checkpoint that SGLang serves.

    Reads the checkpoint's vision weights, which takes less than a second per GB. Raises `ModelMismatchError` with both
    values of every difference, and `OSError` or `ValueError` for a folder that cannot be read.
    """
    differences = "; ".join(
        f"{what}: {folder} has {checkpoint}, the service {service}"
        for what, checkpoint, service in _compared(folder, description)
        if checkpoint != service
    )
    if differences:
        raise ModelMismatchError(f"the encoder service serves another model than SGLang: {differences}")


def _compared(folder: Path, description: Description) -> Iterator[tuple[str, object, object]]:
    """Yield each property that decides rows: its name, the checkpoint's value and the service's value."""
    yield "model_type", read_config(folder)["model_type"], description.model_type
    weights = "vision weights or processor files"  # the fingerprint of a service that counts rows covers both
    if description.geometry is not None:
        processor, weights = ProcessorSettings.from_folder(folder), "vision weights"
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
            yield name, getattr(processor.geometry, name), getattr(description.geometry, name)
        yield "image processor", processor.fingerprint.hex(), description.processor_fingerprint.hex()
    yield weights, model_fingerprint(folder).hex(), description.model_fingerprint.hex()
