"""The server. Modules import only from lower layers; docs/architecture.md shows them."""
