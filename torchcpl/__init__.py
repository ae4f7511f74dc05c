"""Contextual Plackett–Luce: select a coherent sequence or subset out of N candidates.

>>> import torch, torchcpl as cpl
>>> head = cpl.CPLHead(dim=8, hidden=16)
>>> pot = head(torch.randn(2, 5, 8))
>>> cpl.greedy(pot, max_len=3).indices.shape
torch.Size([2, 3])
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchcpl.checks import set_validation
from torchcpl.constraints import Adjacent, Budget, Forbid, History, Require
from torchcpl.decoding import beam, greedy, refine, sample, stochastic_beam
from torchcpl.distribution import ContextualPlackettLuce
from torchcpl.explore import explore
from torchcpl.functional import log_prob
from torchcpl.head import CPLHead
from torchcpl.hypotheses import hypotheses
from torchcpl.inference import compile_for_inference
from torchcpl.interactions import Contextual, Coverage, Dense, DenseCoverage, Interaction, LowRank, Recent
from torchcpl.kernels import set_kernels
from torchcpl.losses import ordered_nll, subset_nll
from torchcpl.potentials import Potentials, Selection
from torchcpl.select import select
from torchcpl.sets import complete, inclusion_probs, next_probs, set_log_prob, set_nll

if TYPE_CHECKING:
    from torchcpl.estimator import Selector
    from torchcpl.predict import Predictor, load

__version__ = "0.1.0"


__all__ = [
    "Adjacent",
    "Budget",
    "CPLHead",
    "Contextual",
    "ContextualPlackettLuce",
    "Coverage",
    "Dense",
    "DenseCoverage",
    "Forbid",
    "History",
    "Interaction",
    "LowRank",
    "Potentials",
    "Predictor",
    "Recent",
    "Require",
    "Selection",
    "Selector",
    "beam",
    "compile_for_inference",
    "complete",
    "explore",
    "greedy",
    "hypotheses",
    "inclusion_probs",
    "load",
    "log_prob",
    "next_probs",
    "ordered_nll",
    "refine",
    "sample",
    "select",
    "set_kernels",
    "set_log_prob",
    "set_nll",
    "set_validation",
    "stochastic_beam",
    "subset_nll",
]
_LATER = {  # imported on first use
    "Predictor": "torchcpl.predict",
    "Selector": "torchcpl.estimator",
    "load": "torchcpl.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'torchcpl' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
