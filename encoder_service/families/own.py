"""The server's own towers, as a family: the Qwen models in `encoder_service.vision`."""

from pathlib import Path

from encoder_contract.processor import ProcessorSettings
from encoder_service.families.model import LoadOptions, VisionModel
from encoder_service.vision import load_tower


def load_own(folder: Path, options: LoadOptions) -> VisionModel:
    """Load one of the server's own towers; raises what `load_tower` does."""
    return load_tower(
        folder,
        device=options.device,
        dtype=options.dtype,
        processor=ProcessorSettings.from_folder(folder),
        attention=options.attention,
        batch_patches=options.batch_patches,
        batch_invariant=options.batch_invariant,
        graphs=options.graphs,
        precision=options.precision,
    )
