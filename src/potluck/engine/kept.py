"""Kept: what a checkpoint keeps of where the run stands, saved and loaded under each name by its owner alone."""

from collections.abc import Callable
from typing import Any

from potluck.errors import CheckpointError
from potluck.save.saves import TENSORS, KeptTensors, Standing
from potluck.save.state import Tensors, tensors_of_json

Save = Callable[[KeptTensors], Any]
"""Gives what JSON can hold, and puts tensors into the dictionary; None: this checkpoint has nothing under the name."""
Load = Callable[[Any, Tensors], None]
"""Takes what was saved under the name, or None where the checkpoint has nothing: it may be of an earlier version."""


class Kept:
    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Save, Load]] = {}

    def add(self, name: str, save: Save, load: Load = lambda saved, tensors: None) -> None:
        """Registers an owner. Names are keys of every checkpoint ever written: one that is given out stays."""
        assert name not in self._pairs, name
        self._pairs[name] = save, load

    def save(self, tensors: KeptTensors) -> Standing:
        saved = {name: save(tensors) for name, (save, _) in self._pairs.items()}
        return {name: value for name, value in saved.items() if value is not None}

    def load(self, standing: Standing) -> None:
        """Calls each owner in the order in which they were registered, since later ones may look at earlier ones."""
        tensors = standing.get(TENSORS, {})
        tensors = tensors_of_json(tensors) if isinstance(tensors, str) else tensors
        for name, (_, load) in self._pairs.items():
            try:
                load(standing.get(name), tensors)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"What the checkpoint keeps as {name!r} is damaged: {error!r}.") from error
