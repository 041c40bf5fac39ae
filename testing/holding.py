"""What a replica holds that has no store: embeddings in name only."""

from encoder_contract.geometry import Grid


class Holding(dict[bytes, Grid]):
    """Addresses and their grids, as a store lists them."""

    def grids(self) -> "Holding":
        """Return what is held."""
        return self
