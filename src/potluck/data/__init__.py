"""Rows: any dataset, sampler or stream, to the micro-batches of each worker, and where an epoch stands."""
