"""The methods of the tables, one file each, with one interface: a loss and a selection."""

from torchcpl.selectors.base import Method
from torchcpl.selectors.hungarian import Hungarian
from torchcpl.selectors.kmeans import kmeans
from torchcpl.selectors.multi_hypothesis import MultiHypothesis
from torchcpl.selectors.pointer import PointerHead
from torchcpl.selectors.stepwise import Stepwise
from torchcpl.selectors.threshold import Threshold

__all__ = ["Hungarian", "Method", "MultiHypothesis", "PointerHead", "Stepwise", "Threshold", "kmeans"]
