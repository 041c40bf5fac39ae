"""Simulates the scheduler on a virtual clock."""
