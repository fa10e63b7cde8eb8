"""The figure of a training: loss of every step, loss and eviction cost on held-out traces."""

from __future__ import annotations

from pathlib import Path

from .train import Curve


def draw(curve: Curve, path: Path) -> Path:
    """Write the figure; the first point is the untrained tokens. Returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(range(1, len(curve.training) + 1), curve.training, color="#BBBBBB", lw=0.7, label="each step")
    left.plot(curve.steps, curve.loss, color="#117733", marker=".", label="held-out traces")
    left.set(xlabel="step", ylabel="squared error of attention", yscale="log")
    left.legend(frameon=False)
    right.plot(curve.steps, curve.cost, color="#117733", marker=".")
    right.set(xlabel="step", ylabel="eviction cost, held-out traces (1 is best)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
