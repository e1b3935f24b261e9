"""A worker of bench/lora.py that a host leads, as if it were on another machine: it shares no memory with the host."""

import sys

import potluck
from bench.lora import BATCH, build, loss_of, make_optimizer, rows
from potluck.fleet import host_connector

host_connector.connect_local = lambda port: None  # type: ignore[assignment]
policy = potluck.Sync() if sys.argv[1] == "sync" else potluck.Cadence.published(anchor=1, max_anchor=1)
with potluck.init(policy) as fleet:
    model = build()
    model, _, loader = fleet.prepare(model, make_optimizer(model), rows(), batch_size=BATCH)
    for _ in fleet.epochs(100):
        for batch in loader:
            fleet.backward(loss_of(model, batch), samples=len(batch))
            fleet.step()
