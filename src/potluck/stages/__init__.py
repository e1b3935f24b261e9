"""One model over several workers: cut into stages, joined by a channel."""
