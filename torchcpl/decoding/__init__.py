"""From potentials to selections: all decoders drive the same step under the same rules."""

from torchcpl.decoding.beam import beam, stochastic_beam
from torchcpl.decoding.greedy import greedy
from torchcpl.decoding.refine import refine
from torchcpl.decoding.sample import sample

__all__ = ["beam", "greedy", "refine", "sample", "stochastic_beam"]
