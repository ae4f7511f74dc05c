"""From potentials to selections: all decoders drive the same step under the same rules."""

from torchcpl.decoding.beam import beam, stochastic_beam
from torchcpl.decoding.greedy import greedy
from torchcpl.decoding.sample import sample

__all__ = ["beam", "greedy", "sample", "stochastic_beam"]
