"""Fuzzing: seeded cases against what reads the bytes of strangers, in this process and on a real server."""
