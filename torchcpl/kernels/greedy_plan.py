"""How ``greedy_triton`` decodes: which kernel, how large its blocks, how many programs a hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from torchcpl.constraints import Rules
from torchcpl.interactions import Dense, LowRank
from torchcpl.potentials import Potentials

LARGEST_BLOCK = 8192  # most candidates whose scores fit into one program's registers
BUILD_LIMIT = 2**31  # most bytes of a W that is built for speed
PROGRAMS = 1056  # programs that saturate memory: eight for each of 132 multiprocessors
SECOND_WARPS = 8  # at least so many warps, of 32 candidates each, where a step reads a column of a second matrix too
# (do several programs share a hypothesis, bytes of an element): elements of a tile of keys, warps, pipeline stages.
# The quickest on an H200.
TILES = {
    (True, 4): (2048, 2, 1),
    (True, 2): (2048, 2, 3),
    (False, 4): (32768, 8, 1),
    (False, 2): (16384, 8, 2),
}
STAGED_BYTES = 2**17  # of the tiles in a pipeline, which shared memory holds
LEAST_TILES = 4  # of a program: with fewer, combining the programs' results would take as long as finding them

# Rough rates of a data-centre GPU, to compare the variants.
DEVICE_BYTES = 4e12  # memory traffic of the whole device, a second
PROGRAM_BYTES = 6e10  # what one program can read, a second
FLOPS = {torch.float32: 4e13, torch.float16: 5e14, torch.bfloat16: 5e14}
LAUNCH = 1e-5  # seconds: less in a captured graph, more out of one


@dataclass(frozen=True)
class Plan:
    """A variant of the kernel and its sizes."""

    kernel: str  # block: W, scores in registers | tiles: W, scores in memory | factored: keys and values
    size: int  # candidates of a block or tile
    warps: int = 8
    programs: int = 1  # that share the candidates of a hypothesis, factored only; if several, every step is a launch
    stages: int = 1  # of the pipeline that loads tiles of keys, factored only


@cache
def dense(n: int, alone: bool) -> Plan:
    """With W dense, ``alone`` or beside another matrix, of which a step reads a column too: then more threads pay."""
    block = max(16, 1 << (n - 1).bit_length())
    if block > LARGEST_BLOCK:
        return Plan("tiles", 4096)
    least = 1 if alone else min(max(block // 32, 1), SECOND_WARPS)
    return Plan("block", block, warps=min(max(block // 256, least), 16))


@cache
def factored(rows: int, n: int, hidden: int, bytes_each: int, several: bool) -> Plan:
    """With keys and values, one program per hypothesis or ``several``; on an H200 many small ones are fastest."""
    deep = max(16, 1 << (max(hidden, 1) - 1).bit_length())
    numbers, warps, stages = TILES[several, bytes_each]
    size = min(max(16, numbers // deep), 256)
    if stages * size * deep * bytes_each > STAGED_BYTES:
        stages = 1
    programs = max(1, min(PROGRAMS // rows, -(-n // (LEAST_TILES * size)))) if several else 1
    return Plan("factored", size, min(warps * max(1, size * deep // numbers), 16), programs, stages)


def buildable(pot: Potentials) -> bool:
    """Whether the W of a LowRank interaction is small enough to be built."""
    assert isinstance(pot.interaction, LowRank)
    batch, n = pot.unary.shape
    return batch * n * n * pot.interaction.keys.element_size() <= BUILD_LIMIT


def plan(pot: Potentials, rules: Rules, width: int = 1, draws: bool = False) -> Plan:
    """The cheapest variant for ``width`` hypotheses a row."""
    batch, n = pot.unary.shape
    if not isinstance(pot.interaction, LowRank):
        return dense(n, alone=isinstance(pot.interaction, Dense))
    keys = pot.interaction.keys
    rows, hidden, size = batch * width, keys.shape[2], keys.element_size()
    read = n * hidden * size  # bytes of keys, all of which a step of a hypothesis reads
    number = 2 * hidden / FLOPS[keys.dtype] + 2 * size / DEVICE_BYTES  # seconds to compute one of W, write and read it
    alone = rules.max_len * read * max(1 / PROGRAM_BYTES, rows / DEVICE_BYTES)
    ways = {factored(rows, n, hidden, size, several=False): alone}
    if not draws:
        ways[factored(rows, n, hidden, size, several=True)] = rules.max_len * (read * rows / DEVICE_BYTES + LAUNCH)
    if buildable(pot):
        ways[dense(n, alone=True)] = batch * n * n * number
    return min(ways, key=lambda way: ways[way])
