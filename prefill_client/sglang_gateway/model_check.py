"""At start: whether the service encodes as the language server's own checkpoint says."""

from collections.abc import Iterator
from pathlib import Path

from encoder_contract.checkpoint import configuration_fingerprint, model_fingerprints, read_config
from encoder_contract.errors import ModelMismatchError
from encoder_contract.processor import ProcessorSettings
from prefill_client import Description


def check_model(folder: Path, description: Description) -> None:
    """Compare the service with the checkpoint that SGLang serves. Reads its vision weights: under a second per GB.

    Raises `ModelMismatchError` with both values of everything that differs, and `OSError` or `ValueError` for a folder
    that cannot be read.
    """
    differing = [each for each in _compared(folder, description) if each[1] != each[2]]
    if differing:
        told = "; ".join(
            f"{what}: {folder} has {ours}, the service {theirs}" for what, ours, theirs in differing
        )
        raise ModelMismatchError(f"the encoder service serves another model than SGLang: {told}")


def _compared(folder: Path, description: Description) -> Iterator[tuple[str, object, object]]:
    """Yield what decides rows, with the checkpoint's value and the service's."""
    yield "model_type", read_config(folder)["model_type"], description.model_type
    weights = "vision weights or processor files"  # where the service counts rows, its fingerprint has both
    if description.geometry is not None:
        processor, weights = ProcessorSettings.from_folder(folder), "vision weights"
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
            yield name, getattr(processor.geometry, name), getattr(description.geometry, name)
        yield "image processor", processor.fingerprint.hex(), description.processor_fingerprint.hex()
    # A service that only stores has no weights: its fingerprint is that of its configuration.
    theirs = description.model_fingerprint
    ours = [*model_fingerprints(folder).values(), configuration_fingerprint(folder)]
    yield weights, (theirs if theirs in ours else ours[0]).hex(), theirs.hex()
