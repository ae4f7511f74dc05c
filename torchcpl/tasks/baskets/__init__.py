"""Baskets: distributions over the sets of items that people choose together."""
