"""Stands in for the library of this name, which sglang.bench_serving imports even for datasets that need no library."""


def load_dataset(*_: object, **__: object) -> None:
    """Refuse: the benchmark reads no dataset of the library."""
    raise NotImplementedError
