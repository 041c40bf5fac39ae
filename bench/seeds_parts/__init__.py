"""The sections of bench.seeds: each measures one table that the work before this project reported."""
