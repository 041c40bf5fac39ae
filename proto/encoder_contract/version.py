"""The version of the package, in one place; imports nothing, so that the build can read it."""

__version__ = "0.2.0"
