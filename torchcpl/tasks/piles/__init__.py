"""Piles: one representative of every group, in vectors of a kind never seen."""
