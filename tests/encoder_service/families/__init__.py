"""Families of models."""
