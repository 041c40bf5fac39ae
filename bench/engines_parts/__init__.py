"""Parts of bench.engines: load generators of the engines, the sides that they compare, and a proxy before engines."""
