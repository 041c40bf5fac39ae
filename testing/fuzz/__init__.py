"""Fuzzing: seeded cases for code that reads untrusted bytes, in this process and on a real server."""
