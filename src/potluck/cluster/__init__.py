"""Schedulers: where `potluck up` runs, and one run over all the nodes that it was given."""
