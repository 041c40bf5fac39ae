"""The demo: a two-turn chat over photos, end to end."""
