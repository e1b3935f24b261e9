"""Sharded: a model whose bytes are split over ranks, with its optimizer. What every way to split it has in common.

For each step: arm and backward, once or many times; then finish, and step or drop.
"""

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.shard.collectives import Collectives
from potluck.shard.ranges import Spec
from potluck.shard.runs import Run, held_bytes


class Sharded:
    model: nn.Module
    optimizer: Optimizer
    """Holds the runs of this rank that are trained, and steps those."""
    runs: list[Run]
    """All that this rank owns of the trained parameters; the runs of all ranks of `collectives` are the whole model."""
    rest: list[Run]
    """The same of parameters that are split too and that the optimizer does not have, such as frozen ones."""
    mirrors: Sequence[Run] = ()
    """Runs that other ranks own too, and write: this one only reads them, such as a weight that two stages have."""
    split: dict[str, Spec]
    """Every parameter that is split over ranks, whoever owns it, by name; what else there is, each rank has whole."""
    group_names: list[list[str]]
    """The names of the whole parameters of each of the optimizer's groups, as they were given."""
    collectives: Collectives
    """The ranks over which the model is split."""
    in_step: bool = False
    """Whether every rank has to run as many backwards as the others, since they talk in each."""
    gathers: bool = False
    """Whether they also wait for each other in every layer, so that no rank's own speed can be seen."""

    cuts_alike: bool = False
    """Whether a parameter is split the same way whatever else the model has, as two stages that have it need it."""

    def tied(self) -> dict[str, str]:
        """Further names of split parameters, and the first name of each."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if (known := first.setdefault(id(parameter), name)) != name and known in self.split:
                found[name] = known
        return found

    def arm(self, *, last: bool) -> None:
        """Before each backward. `last`: the step comes after it."""

    def pass_over(self, outputs: Sequence[Tensor]) -> None:
        """In place of a backward of a forward that gave these, none of whose samples count: this rank takes part in
        what the ranks do together, with a gradient of zero, whatever would come of its numbers."""
        if not self.in_step or self.collectives.world == 1:
            return
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs:
            raise ConfigError(
                "The loss of a batch without samples does not depend on the model, so it has no backward, in which the"
                " other ranks wait for this one. Let it depend on the model, such as by a sum that is divided by"
                " max(samples, 1)."
            )
        muted = [leaf.register_hook(torch.zeros_like) for leaf in self._leaves() if leaf.requires_grad]  # type: ignore[no-untyped-call]
        try:
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        finally:
            for hook in muted:
                hook.remove()

    def _leaves(self) -> list[Tensor]:
        """What a backward gives gradients to."""
        return list(self.model.parameters())

    def start_sums(self) -> None:
        """After the step's last backward: begins what it has not begun."""

    def finish(self) -> None:
        """Until this rank's runs have their whole gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of the whole gradient, on every rank alike."""
        norm = torch.nn.utils.get_total_norm(self.gradients())
        if self.collectives.world == 1:
            return norm
        square = norm.cpu().double().square()
        self.collectives.start_sum(square).wait()
        return square.sqrt()

    def gradients(self) -> list[Tensor]:
        return [run.parameter.grad for run in self.runs if run.parameter.grad is not None]

    def step(self, scale: float = 1.0) -> None:
        """Steps this rank's runs, on their gradients times `scale`."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forgets the gradient: this step is skipped."""
        raise NotImplementedError

    def share(self) -> None:
        """After step(), or when this rank's runs were written: wherever parameters are kept whole, they are told."""

    def settle(self) -> None:
        """Until all that share() began has arrived."""

    @property
    def has_unused(self) -> bool:
        """Whether some parameter got no gradient on this rank."""
        return False

    def drop_unused(self) -> None:
        """Parameters that no rank used are left as they are, as in one process. A collective."""

    def _step_except(self, idle: Set[str]) -> None:
        """The optimizer's step, which leaves these parameters and their state as they are: nobody has used them."""
        kept = [(view, view.clone()) for view in self._views_of(idle)]
        self.optimizer.step()
        for view, before in kept:
            view.copy_(before)

    def _views_of(self, names: Set[str]) -> Iterator[Tensor]:
        for run in self.runs if names else ():
            state = self.optimizer.state.get(run.parameter, {}).values()
            for flat in (run.parameter.data, *(v for v in state if isinstance(v, Tensor) and v.dim())):
                yield from (part for span, part in run.cut(flat) if span.name in names)

    def memory_bytes(self) -> dict[str, int]:
        """What this rank holds of the model between backward and step."""
        return held_bytes(self._parameters(), self.gradients(), self.optimizer)

    def _parameters(self) -> list[Tensor]:
        return [run.parameter for run in self.runs]
