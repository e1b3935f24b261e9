"""Ties: weights that several stages of a model have, such as an embedding that is also the head.

Each stage steps its own copy, on the sum of all stages' gradients; so all copies stay equal, to the last bit.
"""

import json
from collections import Counter

from torch import Tensor, nn

from potluck.link.grid import Grid
from potluck.stages.channel import Channel, Label
from potluck.stages.stage_modules import StageShard, state_held_by


class Ties:
    def __init__(self, own: nn.Module, places: Grid) -> None:
        """`own`: this worker's part of the model. Called on every worker of a pipeline alike."""
        self._place = places.place
        self.is_first_of: dict[str, bool] = {}
        """By name: whether this worker saves it and counts it, or another that has it too."""
        self._holders: dict[str, list[int]] = {}
        """Places of the stages that hold each tied and trained parameter."""
        names = [name for name, _ in state_held_by(own)]
        trained = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
        own_names = json.dumps([names, sorted(trained)]).encode()
        every = [json.loads(data) for data in places.stage_group.gather_bytes(own_names)]
        names_of_stages = [set(held) for held, _ in every]
        counts = Counter(name for _, held in every for name in held)
        self.shared = sorted(name for name, count in counts.items() if count > 1)
        """Parameters that any two stages train, the same list on each of them."""
        for name in names:
            holders = [place for place, held in enumerate(names_of_stages) if name in held]
            self.is_first_of[name] = holders[0] == self._place
            if len(holders) > 1 and name in trained:
                self._holders[name] = holders

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are tied and trained. Where one stage has used one in a step, all of them step
        it."""
        return frozenset(self._holders)

    def add_up(self, part: StageShard, channel: Channel, step: int) -> None:
        """The sum of all stages' gradients becomes each one's."""
        if not self._holders:
            return
        order = sorted(self._holders)
        labels = {
            (name, source, target): Label(step, "tied", source, target, number)
            for number, name in enumerate(self.shared)  # by which all of them know it: one may have others too
            if name in self._holders
            for source in self._holders[name]
            for target in self._holders[name]
        }
        channel.expect([label for (_, source, to), label in labels.items() if to == self._place != source])
        own = {name: part.gradient_of(name) for name in order}
        for (name, source, to), label in labels.items():
            if source == self._place != to:
                channel.send(label, own[name])
        sums = {name: self._sum(name, own[name], channel, labels) for name in order}
        channel.flush()  # until then what is sent must stay as it is
        for name, total in sums.items():
            part.put_gradient(name, total)

    def counted_elsewhere(self, part: StageShard) -> float:
        """The norm of what another stage has too, and counts."""
        return part.norm_of([name for name in self._holders if not self.is_first_of[name]])

    def _sum(self, name: str, own: Tensor, channel: Channel, labels: dict[tuple[str, int, int], Label]) -> Tensor:
        """Sum in the order of stages, on every one of them."""
        total: Tensor | None = None
        for other in self._holders[name]:
            term = own if other == self._place else channel.receive(labels[name, other, self._place])
            total = term.clone() if total is None else total.add_(term)
        assert total is not None
        return total
