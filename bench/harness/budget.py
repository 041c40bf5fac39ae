"""The time budget of a benchmark, which measures one round and then chooses the rounds that fit."""

from time import monotonic


class TimeBudget:
    """A number of seconds from now; `left_out` names the measurements that did not fit."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        """The remaining seconds; negative when the budget is exceeded."""
        return self._until - monotonic()

    def affords(self, what: str, seconds: float) -> bool:
        """Return whether `seconds` are left for a measurement; if not, add it to `left_out`."""
        if seconds <= self.left_s:
            return True
        self.left_out.append(what)
        return False

    def count(self, what: str, wanted: int, one_s: float, *, share: float = 1.0, least: int = 1) -> int:
        """Return how many of `wanted` fit into a share of the remaining time, if each takes `one_s`."""
        affordable = max(min(least, wanted), min(wanted, int(self.left_s * share / one_s)))
        if affordable < wanted:
            self.left_out.append(f"{wanted - affordable} of {wanted} {what}")
        return affordable
