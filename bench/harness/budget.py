"""The time budget of a benchmark: it measures one round, then chooses as many rounds and cases as it has time for."""

from collections.abc import Mapping, Sequence
from time import monotonic

# A benchmark may take ten minutes on any machine. What is running when this is used up still ends.
DEFAULT_S = 420.0


class Budget:
    """Seconds from now; `left_out` names what there was no time for."""

    def __init__(self, seconds: float = DEFAULT_S) -> None:
        self._until = monotonic() + seconds
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative when more were used."""
        return self._until - monotonic()

    def affords(self, what: str, seconds: float) -> bool:
        """Return whether there is time for something that takes `seconds`; if not, note that it is left out."""
        if seconds <= self.left_s:
            return True
        self.left_out.append(what)
        return False

    def count(self, what: str, wanted: int, one_s: float, *, share: float = 1.0, least: int = 1) -> int:
        """Return how many of `wanted` fit into a share of the time left, when each takes `one_s`."""
        affordable = max(min(least, wanted), min(wanted, int(self.left_s * share / one_s)))
        if affordable < wanted:
            self.left_out.append(f"{wanted - affordable} of {wanted} {what}")
        return affordable

    def choose(
        self, round_s: Mapping[str, float], wanted: int, *, first: Sequence[str], share: float
    ) -> tuple[int, list[str]]:
        """Return how many rounds of which cases fit into a share of the time left.

        `round_s` is the time of one round of each case; each case needs one round more to warm up. Rounds are dropped
        only to fit the cases named `first`; other cases that do not fit are left out.
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
