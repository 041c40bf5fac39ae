"""The scheduler on a virtual clock."""
