"""How a pick changes what is left: the model's one moving part, one file a kind."""

from torchcpl.interactions.base import Additive, Interaction
from torchcpl.interactions.contextual import Contextual
from torchcpl.interactions.coverage import Coverage
from torchcpl.interactions.dense import Dense
from torchcpl.interactions.dense_coverage import DenseCoverage
from torchcpl.interactions.lowrank import LowRank
from torchcpl.interactions.recent import Recent

__all__ = ["Additive", "Contextual", "Coverage", "Dense", "DenseCoverage", "Interaction", "LowRank", "Recent"]
