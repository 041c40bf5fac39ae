"""A Docker engine in a folder of its own, and the project's images built with it, also without an image registry."""
