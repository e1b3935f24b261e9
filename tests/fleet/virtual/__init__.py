"""A fleet in one process, on a clock of its own: Coordinator, Member, Mean and Journal are real, all around them toys.

A worker drives a real Member, with a vector of a few numbers for a model. What a slice's gradient is depends on its
rows and on the weights alone, so a run must end with the bits of undisturbed(), which knows nothing of a fleet. Faults
are scripted, and a test proves by `fired` that its fault came about.
"""

from tests.fleet.virtual.faults import FaultScript
from tests.fleet.virtual.fleet import Fleet
from tests.fleet.virtual.line import Average, Line, Payload
from tests.fleet.virtual.toy import (
    BATCH,
    EPOCHS,
    PARTS,
    PATIENCE_S,
    ROWS,
    SECRET,
    SLICES,
    STEPS,
    VALIDATION_ROWS,
    State,
    described,
    digest_of,
    fresh_weights,
    loss_of,
    undisturbed,
    validation_of,
)
from tests.fleet.virtual.worker import Worker

__all__ = [
    "BATCH",
    "EPOCHS",
    "PARTS",
    "PATIENCE_S",
    "ROWS",
    "SECRET",
    "SLICES",
    "STEPS",
    "VALIDATION_ROWS",
    "Average",
    "FaultScript",
    "Fleet",
    "Line",
    "Payload",
    "State",
    "Worker",
    "described",
    "digest_of",
    "fresh_weights",
    "loss_of",
    "undisturbed",
    "validation_of",
]
