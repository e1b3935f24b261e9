"""Loop: what the one who writes the loop says of the run, a trainer or a loop of your own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Loop:
    """Settings that a loop gives the run, as `fleet.loop`: most of them before the first step, and alike on every
    worker."""

    has_trainer: bool = False
    """A trainer counts epochs, hears Ctrl-C, saves and shows the run; else a loop of your own does, with our help."""
    counts_epochs: bool = False
    """epochs() or a trainer counts the passes over the loader, and so knows how many of them the run has."""
    rows_limit: int | None = None
    """The run is over after this many rows; only policies that plan several steps ahead need to know."""
    lr_factor: Callable[[int], float] | None = None
    """A function from rows seen to the share of its peak that the learning rate has; None: the rate is yours."""
    samples_per_row: float = 1.0
    """How many samples a row counts as; only for plain peers of a host, which cannot say so themselves."""
    flops_per_sample: float = 0.0
    """Floating-point operations that a sample costs, forward and backward; 0: not known. It is only shown."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of every worker's step that must be alike: the optimizer's, clipping, the schedule."""
    about: dict[str, Any] = field(default_factory=dict)
    """Details of the run that a host shows: its name, the unit of samples, how many steps there are."""
    memo: dict[str, int] = field(default_factory=dict)
    """Numbers that a loop wants to find again if this worker is killed and restarted while the run continues."""
    best: tuple[int, float] | None = None
    """The step with the lowest validation loss so far, and that loss: the checkpoint of this step is kept as well."""

    def end_after(self, steps: int, *, rows_of_epoch: int, batch_size: int) -> None:
        """Sets the end of the run to this many steps, in epochs of so many rows."""
        whole, rest = divmod(steps, -(-rows_of_epoch // batch_size))
        self.rows_limit = whole * rows_of_epoch + min(rest * batch_size, rows_of_epoch)
        self.about |= {"steps_total": steps}
