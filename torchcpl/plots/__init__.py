"""Results in, figures out: arrays to matplotlib figures in one style."""

from torchcpl.plots.bags import embedding, interaction, picked_images, selection_steps
from torchcpl.plots.curves import Curve, Trade, convergence, grouped_bars, precision_recall, variants
from torchcpl.plots.scenes import Decoding, Route, Scene, animation, decoding_steps, scene_rows
from torchcpl.plots.style import METHODS, PALETTE, render, save

__all__ = [
    "METHODS", "PALETTE", "Curve", "Decoding", "Route", "Scene", "Trade", "animation", "convergence", "decoding_steps",
    "embedding", "grouped_bars", "interaction", "picked_images", "precision_recall", "render", "save", "scene_rows",
    "selection_steps", "variants",
]  # fmt: skip
