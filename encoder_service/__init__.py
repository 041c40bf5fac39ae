"""The server: one file per room, imports only downward (docs/architecture.md has the map)."""
