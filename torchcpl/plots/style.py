"""The style of all figures, without global state.

Colours are M. Petroff's ten, distinguishable with any colour vision; no information is in the colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchcpl.files import extra, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
Array = NDArray[Any]

PALETTE = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
# The colour of each method, in the figures of all tasks.
METHODS = {
    "cpl": PALETTE[2],
    "pointer": PALETTE[0],
    "hungarian": PALETTE[1],
    "threshold": PALETTE[4],
    "multi_hypothesis": PALETTE[5],
    "mixture": PALETTE[4],
    "dpp": PALETTE[1],
    "ndpp": PALETTE[5],
}
INK, FAINT = "#22262b", "#c9ced6"
WIDTH = 6.9  # inches, the text width of a paper
STYLE = {
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width", "grid.linewidth"), 0.6),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "grid.color": "#e6e9ee",
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "torchcpl",  # reproducible files
}


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Draw in this style, without changing matplotlib's settings."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> T:
        with extra():
            import matplotlib
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


@styled
def render(figure: Figure, kind: str) -> bytes:
    """The figure as ``png`` or ``svg``."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=200, bbox_inches="tight", pad_inches=0.04, metadata=metadata)
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path) -> None:
    """Write ``stem.png`` and ``stem.svg``."""
    for kind in ("png", "svg"):
        write_atomic(f"{stem}.{kind}", render(figure, kind))


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, packed: bool = False, **settings: Any
) -> tuple[Figure, Any]:
    """A figure of a size in inches with its axes, by `Figure.subplots`; ``packed`` ones are close together."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    close = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    figure = Figure(figsize=(width, height), layout=close if packed else "constrained")
    return figure, figure.subplots(rows, columns, **settings)


def heatmap(figure: Figure, axes: Any, values: Array, quantile: float, label: str) -> None:
    """A matrix from blue to red, white at 0, saturated beyond a quantile of the magnitudes; with a colour bar."""
    limit = float(np.nanquantile(np.abs(values), quantile)) or 1.0
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(True)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, extend="both").set_label(label)


def dark(colour: str) -> str:
    """A darker shade, for text on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part * 0.68):02x}" for part in parts)
