"""The time budget of a benchmark, which measures one round and then chooses the rounds and cases that fit."""

from collections.abc import Mapping, Sequence
from time import monotonic

# A benchmark may take ten minutes on any machine. The measurement that runs when the budget is used up still ends.
DEFAULT_S = 420.0


class TimeBudget:
    """A number of seconds from now; `left_out` names the measurements that did not fit."""

    def __init__(self, seconds: float = DEFAULT_S) -> None:
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

    def choose(
        self, round_s: Mapping[str, float], wanted: int, *, first: Sequence[str], share: float
    ) -> tuple[int, list[str]]:
        """Return the number of rounds, and the cases, that fit into a share of the remaining time.

        `round_s` is the time of one round of each case; each case needs one more round to warm up. Cases that do not
        fit are left out, except for those named in `first`: rounds are dropped to fit them.
        """
        order = sorted(round_s, key=lambda case: case not in first)
        for rounds in range(wanted, 0, -1):
            chosen, left_s = [], self.left_s * share
            for case in order:
                if (cost_s := round_s[case] * (rounds + 1)) <= left_s:
                    chosen.append(case)
                    left_s -= cost_s
            if set(first) <= set(chosen):
                break
        self.left_out += [f"case {case}" for case in round_s if case not in chosen]
        self.left_out += [f"{wanted - rounds} of {wanted} rounds"] if rounds < wanted else []
        return rounds, [case for case in round_s if case in chosen]
