"""Contextual Plackett–Luce: select a coherent sequence or subset out of N candidates.

>>> import torch, torchcpl as cpl
>>> head = cpl.CPLHead(dim=8, hidden=16)
>>> pot = head(torch.randn(2, 5, 8))
>>> cpl.greedy(pot, max_len=3).indices.shape
torch.Size([2, 3])
"""

from torchcpl.checks import set_validation
from torchcpl.constraints import Adjacent, Budget, Forbid, History, Require
from torchcpl.decoding import beam, greedy, sample, stochastic_beam
from torchcpl.distribution import ContextualPlackettLuce
from torchcpl.functional import log_prob
from torchcpl.head import CPLHead
from torchcpl.inference import compile_for_inference
from torchcpl.interactions import Contextual, Coverage, Dense, Interaction, LowRank, Recent
from torchcpl.kernels import set_kernels
from torchcpl.losses import ordered_nll, subset_nll
from torchcpl.potentials import Potentials, Selection
from torchcpl.sets import complete, inclusion_probs, next_probs, set_log_prob, set_nll

__version__ = "0.1.0"

__all__ = [
    "Adjacent",
    "Budget",
    "CPLHead",
    "Contextual",
    "ContextualPlackettLuce",
    "Coverage",
    "Dense",
    "Forbid",
    "History",
    "Interaction",
    "LowRank",
    "Potentials",
    "Recent",
    "Require",
    "Selection",
    "beam",
    "compile_for_inference",
    "complete",
    "greedy",
    "inclusion_probs",
    "log_prob",
    "next_probs",
    "ordered_nll",
    "sample",
    "set_kernels",
    "set_log_prob",
    "set_nll",
    "set_validation",
    "stochastic_beam",
    "subset_nll",
]
