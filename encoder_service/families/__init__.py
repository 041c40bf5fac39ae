"""Families of models: the interface of a plug-in, which one serves a checkpoint, and the towers of `transformers`."""
