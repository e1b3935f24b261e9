"""How numbers travel: sums of slices in a fixed tree, means over replicas, and what a window has changed."""
