"""Which families the gateway serves: those whose rows SGLang takes from an encoder."""

from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import Grid
from prefill_client import Description
from prefill_client.sglang_gateway.frames import SUPPORTED

SERVED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose architectures SGLang accepts with `--language-only`, in every supported release."""

# Patches along each side of a row, in all of `SERVED`. A service that counts rows does not say it.
MERGE_SIZE = 2

_REFUSED = {
    "kimi_k25": "SGLang serves it with code from the checkpoint, and the encoder service with that of transformers,"
    " whose rows were not compared with it",
    **dict.fromkeys(
        ("glm5_next", "minimax_m3_vl", "muse_spark"),
        "its rows were not compared with those of SGLang's own tower",
    ),
}
_NOT_ACCEPTED = f"with --language-only, SGLang {SUPPORTED[0]} to {SUPPORTED[-1]} start for other models alone"


def check_family(description: Description) -> None:
    """Raise `ModelMismatchError`, which says why, for a service of a model that is not served."""
    model_type = description.model_type
    if model_type not in SERVED:
        raise ModelMismatchError(
            f"the gateway cannot serve {model_type!r}, the model of {description.model_name}:"
            f" {_REFUSED.get(model_type, _NOT_ACCEPTED)}. It serves {', '.join(SERVED)}; docs/models.md names the"
            " engines for other models"
        )


def grid_of_patches(grid: Grid, description: Description) -> Grid:
    """Return the grid that SGLang lays an image out by, from the service's: of patches, or of rows where it counts."""
    if description.geometry is not None:
        return grid
    return Grid(grid.t, grid.h * MERGE_SIZE, grid.w * MERGE_SIZE)
