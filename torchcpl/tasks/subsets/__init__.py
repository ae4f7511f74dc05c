"""Representative subsets: pick one element of every class present in a bag."""
