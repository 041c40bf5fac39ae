"""Traces of requests and their pictures."""
