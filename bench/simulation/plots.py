"""Draws the plots of docs/scheduling.md from simulations."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from bench.simulation.policies import POLICIES
from bench.simulation.simulator import Load
from bench.simulation.trials import BIG_IMAGES, FIRST, LINEAR, OURS, SKEWED, STRETCHES, UNIFORM, Trial, answer

LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
COLORS = {FIRST: "#777777", "earliest-need": "#2a78b8", "chunk-first": "#d08020", OURS: "#2f8f4e"}


def draw(folder: Path) -> None:
    """Write every plot into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # The same file for the same data, whenever it is drawn.
    plt.rcParams.update({"svg.hashsalt": "scheduling", "axes.spines.top": False, "axes.spines.right": False})
    for name, figure in (("load", _load()), ("tail", _tail()), ("stretch", _stretch())):
        figure.tight_layout()
        figure.savefig(folder / f"scheduling-{name}.svg", metadata={"Date": None})
        plt.close(figure)


def _load() -> Figure:
    trials = [Trial(p.name, Load(SKEWED, load=load), 2500, 2) for p in POLICIES for load in LOADS]
    found = iter(answer(trials))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for policy in POLICIES:
        figures = [next(found) for _ in LOADS]
        left.plot(LOADS, [f.mean for f in figures], "o-", color=COLORS[policy.name], label=policy.name)
        right.plot(LOADS, [f.p99 for f in figures], "o-", color=COLORS[policy.name])
    for axes, title in ((left, "mean"), (right, "p99")):
        axes.set(
            title=f"TTFT, {title}", xlabel="load of the encoder", ylabel="encodes of one image", yscale="log"
        )
    left.legend(frameon=False)
    return figure


def _tail() -> Figure:
    names = [policy.name for policy in POLICIES]
    figure, both = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, (title, sizes) in zip(both, (("skewed", SKEWED), ("uniform", UNIFORM)), strict=True):
        for name, found in zip(names, answer([Trial(n, Load(sizes), 2500, 2) for n in names]), strict=True):
            waits = sorted(found.ttft_s)
            rest = [1 - at / len(waits) for at in range(len(waits))]
            axes.plot(waits, rest, color=COLORS[name], label=name)
        axes.set(title=f"{title} sizes, load 0.8", xlabel="TTFT", ylabel="share of requests above", xscale="log",
                 yscale="log")  # fmt: skip
    both[0].legend(frameon=False)
    return figure


def _stretch() -> Figure:
    curves = {"logarithmic (ours)": (STRETCHES, "#2f8f4e"), "linear": (LINEAR, "#8050a0")}
    names = [FIRST, *(policy.name for policies, _ in curves.values() for policy in policies.values())]
    base, *rest = answer([Trial(name, Load(SKEWED), 5000, 4) for name in names])
    found = iter(rest)
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6))
    for label, (policies, color) in curves.items():
        figures = [next(found) for _ in policies]
        for axes, of in zip(both, ("p99", "big_p99"), strict=True):
            points = [(base.mean / f.mean, getattr(f, of) / getattr(base, of)) for f in figures]
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label)
            for stretch, point in zip(policies, points, strict=True):
                axes.annotate(
                    str(stretch), point, (4, -10), textcoords="offset points", fontsize=8, color=color
                )
    for axes, title in zip(both, ("p99 of all", f"p99 of ≥ {BIG_IMAGES} images"), strict=True):
        axes.set(
            xlabel="first-come's mean TTFT over its own", ylabel="its p99 over first-come's", title=title
        )
    both[0].legend(frameon=False)
    return figure
