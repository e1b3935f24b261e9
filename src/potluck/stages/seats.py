"""Builds a stage's model: its own layers in their seats, and stand-ins for all that other stages have.

A layer in its seat is called as it always was, and knows where its stage begins and ends. Stand-ins have no parameters.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError
from potluck.stages.forms import (
    Crossing,
    Inputs,
    OpListener,
    arguments,
    fill,
    has_form,
    map_tensors,
    pick,
    put,
    tensors_in,
    with_arguments,
)
from potluck.stages.plan import Form
from potluck.stages.recomputing import check_not_again, checkpointed, close_checkpoints

Activation = tuple[Tensor, ...]
"""The tensors that go from one stage to the next."""


class StageExit(BaseException):
    """Leaves the loss function once the stage has done its part. A BaseException, so that no `except` keeps it."""

    def __init__(self, by: "Pass", activation: Activation) -> None:
        super().__init__("a stage has done its part")
        self.by = by
        self.activation = activation


def seed_of(seed: int, place: int) -> int:
    """Derive the seed of a layer's random numbers. Place 0 is what runs before the chain, then come its links, then
    what follows."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {place}".encode(), digest_size=7).digest(), "big")


class Pass:
    """The run that is under way in a stage: one at a time."""

    is_running = False
    has_entered = False
    is_left = False
    """Whether the model's forward has ended where the stage does."""
    on_enter: Callable[[], None] | None = None
    """Called as soon as the stage's own work begins."""

    opening: Crossing | None = None
    """The end of what runs before the chain, if that is behind an operation."""

    def __init__(self, *, hears: bool = False) -> None:
        """`hears`: whether some layer ends behind an operation of the model's own."""
        self.hears = hears
        self.listener = OpListener(self.on_operation)
        self._crossing: Crossing | None = None
        self._done = 0
        """How many operations of it."""
        self.has_skips = False
        """Whether layers are handed something past the layers between."""
        self.arrivals: dict[tuple[int, int], int] = {}
        self.carries: tuple[tuple[int, int], ...] = ()
        """What is handed on beside the output of the last layer."""
        self._received: Activation | None = None
        self._picked: list[Tensor] = []
        self._own: dict[int, list[Tensor]] = {}
        """What own layers gave that is carried further, by the layer's number."""
        self._leaving: Activation | None = None
        self._given: Activation = ()
        self._seed: int | None = None
        self._generators: list[torch.Generator] = []
        self.device = torch.device("cpu")

    @contextmanager
    def begin(self, received: Activation, seed: int | None, device: torch.device) -> Iterator[None]:
        assert not self.is_running, "a stage runs one micro-batch at a time"
        self._given, self._seed, self.device = received, seed, device
        self._generators = generators_of(device) if seed is not None else []
        states = [generator.get_state() for generator in self._generators]
        self.is_running, self.has_entered, self.is_left = True, False, False
        self._crossing = self._leaving = self._received = None
        self._own = {}
        if not received:
            self._enter()
        self.sow(0)
        try:
            with self.listener if self.hears else nullcontext():
                yield
        finally:
            self.is_running, self._leaving = False, None
            self._given, self._received, self._picked, self._own = (), None, [], {}
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    @property
    def is_inside(self) -> bool:
        """Whether what the model computes now is this stage's work, and not thrown away."""
        is_coming_in = self._crossing is not None and self._crossing.way == "in"
        return self.has_entered and not is_coming_in and self._leaving is None

    def take(self) -> Activation:
        """Hand the received tensors to the first of the stage's own layers."""
        self._enter()
        return self._arrived()

    def _arrived(self) -> Activation:
        if self._received is None:
            with self.listener.closed():
                self._received = tuple(map(_entered, self._given))
        return self._received

    def cross(self, crossing: Crossing, output: Any) -> Any:
        """A layer has given its output, with which the model's forward continues, or the stage ends."""
        if crossing.is_door:
            self._enter()
        self._crossing, self._done, self._picked = crossing, 0, []
        return self._hand_on(crossing, output)

    def run_layer(
        self,
        place: int,
        takes: Form | None,
        crossing: Crossing,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One of the stage's own layers runs. `takes`: the form of its arguments that are received."""
        if not self.is_running:
            check_not_again(crossing.layer)
            return layer(*args, **kwargs)
        self.check_arrival()
        if takes is None and not self.has_entered:
            raise ConfigError(_LEFT_OUT)
        if takes is not None:
            args, kwargs = with_arguments(args, kwargs, fill(takes, self.take()))
        self.sow(place)
        with self.listener.closed():
            output = checkpointed(layer, args, kwargs)
        return self.cross(crossing, output)

    def run_part(self, name: str, part: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module around the chain runs, which counts as one operation of the model's forward."""
        with self.listener.closed():
            output = part(*args, **kwargs)
        return self.on_operation(name, (args, kwargs), output) if self.is_running else output

    def on_operation(self, name: str, inputs: Inputs, output: Any) -> Any:
        """Hand on the output if this operation, of the model's own forward or a module around its layers, belongs to
        the crossing."""
        crossing = self._crossing
        if crossing is None or name != crossing.operations[self._done] or not has_form(output):
            return output
        self._done += 1
        return self._hand_on(crossing, output)

    def _leave(self, crossing: Crossing) -> None:
        """Leave the stage: at once, or when the next layer begins. Until then the model may change buffers, which both
        stages have."""
        if missing := [each for each in self.carries if each not in self.arrivals and each[0] not in self._own]:
            raise ConfigError(f"{_LEFT_OUT} It was layer {missing[0][0]} of the plan.")
        with self.listener.closed():  # not what the model has of what arrived, on which it may have put hooks
            carried = [
                _entered(self._given[self.arrivals[each]]) if each in self.arrivals else self._own[each[0]][each[1]]
                for each in self.carries
            ]
        self._leaving = (*self._picked, *carried)
        if crossing.is_last or not crossing.operations:
            raise StageExit(self, self._leaving)

    def check_arrival(self) -> None:
        """The next layer begins."""
        if self._leaving is not None:
            raise StageExit(self, self._leaving)
        if (crossing := self._crossing) is not None:
            raise ConfigError(
                f"After layer {crossing.layer} the next layer runs, without {crossing.operations[self._done]} between"
                " them, which was there when the model was surveyed. A model that is cut into stages makes what goes"
                " from layer to layer alike in every batch, in training and in evaluation: put what differs into a"
                " layer."
            )

    def _hand_on(self, crossing: Crossing, output: Any) -> Any:
        form = crossing.forms[self._done]
        if crossing.way == "in":
            output = put(form, output, self._arrived())
        elif crossing.way == "out" or crossing.is_carried:
            self._picked += pick(form, output, f"What follows layer {crossing.layer}")
            if crossing.operations or crossing.is_carried:
                # The model runs on until the stage ends, and so does the next stage's: what it does there to the tensor
                # itself, hooks and operations in place, must not be done to what is sent too.
                with self.listener.closed():
                    output = map_tensors(torch.clone, output)
        if self._done == len(crossing.operations):
            self._crossing = None
            if crossing.is_carried:
                self._own[crossing.number] = self._picked
            if crossing.way == "out":
                self._leave(crossing)
            self.sow(crossing.place)
        return output

    def sow(self, place: int) -> None:
        if self._seed is not None:
            seed = seed_of(self._seed, place)
            for generator in self._generators:
                generator.manual_seed(seed)

    def _enter(self) -> None:
        self.has_entered = True
        if self.on_enter is not None:
            self.on_enter()


_LEFT_OUT = (
    "The layer before a cut did not run in this batch, and did when the model was surveyed. A model that is cut into"
    " stages runs each of its layers in every batch: to leave one out now and then, let the layer itself return its"
    " input."
)


class _Absent(torch.autograd.Function):
    """Zeros in the place of what another stage has. A gradient for them says that this stage computed with them."""

    @staticmethod
    def forward(ctx: Any, zeros: Tensor, told: Tensor, what: str) -> Tensor:
        ctx.what = what
        return zeros.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError(_used_elsewhere(ctx.what))


def _used_elsewhere(what: str) -> str:
    return (
        f"{what} was used in another place than in the batch with which the model was surveyed, on a stage that does"
        " not have it. A model that is cut into stages uses its parts in the same places in every batch: let the first"
        " rows of the dataset use all that some rows use, or put what differs into a layer."
    )


def absent(zeros: Tensor, what: str) -> Tensor:
    """Zeros that a stage's own results must not be made from."""
    if not torch.is_grad_enabled() or not zeros.is_floating_point():
        return zeros
    return _Absent.apply(zeros, torch.zeros((), requires_grad=True), what)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    """Copies a tensor so that it is no leaf, and a layer may work on it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _entered(tensor: Tensor) -> Tensor:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


def generators_of(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def seated(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer, called through its seat: outside of hooks, of compile() and of another forward."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return self._seat(functools.partial(kind.__call__, self), args, kwargs)

    return _variant("seated", kind, {"__call__": __call__})


def hollow(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module that holds layers: where a parameter of its own is absent, it has zeros without memory."""

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        try:
            return kind.__getattr__(self, name)
        except AttributeError:
            outline = self.__dict__.get("_absent", {}).get(name)
            if outline is None:
                raise
            with self._now.listener.closed():
                zeros = torch.zeros((), dtype=outline.dtype, device=self._now.device).expand(outline.shape)
                return absent(zeros, name) if self._now.is_running else zeros

    return _variant("hollow", kind, {"__getattr__": __getattr__, "holds_layers": True})


def left(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a model whose forward ends where its stage does: as one that returns what goes to the next stage.

    The loss function is left only then, so that hooks on the model hear of the end of its forward. fully_shard's would
    otherwise not know what the backward begins with, and never reduce the gradients of the model's own parameters.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._now.is_running and self._now.opening is not None:
                self._now.cross(self._now.opening, None)
            return kind.forward(self, *args, **kwargs)
        except StageExit as reached:
            if reached.by is not self._now:
                raise
            self._now.is_left = True
            close_checkpoints(reached)
            return reached.activation

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        output = kind.__call__(self, *args, **kwargs)
        if self._now.is_left:
            raise StageExit(self._now, tuple(output))
        return output

    return _variant("left", kind, {"forward": forward, "__call__": __call__, "holds_stages": True})


_VARIANTS: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {}
"""One class for all layers of a class, so that they stay alike."""


def _variant(what: str, kind: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    """Under the same name."""
    if (what, kind) not in _VARIANTS:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _VARIANTS[what, kind] = type(kind.__name__, (kind,), methods | names)
    return _VARIANTS[what, kind]


class StandIn(nn.Module):
    """Stands in for a module that this stage does not have: without its parameters, but with its attributes. Gives
    zeros of the shapes that the module would give."""

    stands_in = True

    def __init__(self, original: nn.Module, now: Pass, name: str) -> None:
        super().__init__()
        # Not registered as a module: its parameters have no memory and are nobody's.
        object.__setattr__(self, "_skeleton", skeleton(original))
        self._now, self._name = now, name
        self._known: dict[Any, Any] = {}
        """What it gives for inputs of some shapes, as tensors without memory."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skeleton"], name)

    def _check_run(self) -> None:
        if not self._now.is_running:
            raise ConfigError("A stage's model is a part of the model, and only stage.run() can run it.")

    def _zeros(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        device = tensors[0].device if tensors else self._now.device
        key = None
        if not kwargs and len(tensors) == len(args):
            key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key is None or key not in self._known:
            bare_args, bare_kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
            with torch.no_grad():
                output = self.__dict__["_skeleton"](*bare_args, **bare_kwargs)
            if key is None or len(self._known) >= 64:
                self._known.clear()
            self._known[key] = output
        known = self._known[key]
        return map_tensors(lambda one: torch.zeros(one.shape, dtype=one.dtype, device=device), known)


class AbsentLayer(StandIn):
    """Stands in for a link of the chain."""

    def __init__(
        self,
        original: nn.Module,
        now: Pass,
        name: str,
        *,
        output: Form | None,
        crossing: Crossing | None,
        leaves: Form | None,
    ) -> None:
        """`crossing`: where what was received comes in. `leaves`: it is the first to be met after our own part."""
        super().__init__(original, now, name)
        self._output, self._crossing, self._leaves = output, crossing, leaves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check_not_again(self._name)
        self._check_run()
        self._now.check_arrival()
        if self._leaves is not None:
            given = pick(self._leaves, arguments(args, kwargs), "What the first block gets")
            raise StageExit(self._now, tuple(given))
        if self._output is None:
            raise ConfigError(_LEFT_OUT)
        with self._now.listener.closed():
            output = map_tensors(lambda one: absent(one, self._name), self._stand_in(args, kwargs))
        return output if self._crossing is None else self._now.cross(self._crossing, output)

    def _stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whatever it gives is thrown away at the door. But where the model computes with it, its shape matters."""
        if self._now.hears or self._now.has_skips:
            try:
                return self._zeros(args, kwargs)
            except (RuntimeError, NotImplementedError):  # it does not run without its numbers
                pass
        return fill(self._output or {"value": None}, tensors_in((args, kwargs)))


class AbsentPart(StandIn):
    """Stands in for a module around the chain: gives zeros, which are thrown away at the door."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_run()
        if self._now.is_inside:
            raise ConfigError(_used_elsewhere(self._name))
        try:
            zeros = self._zeros(args, kwargs)
            return map_tensors(lambda one: absent(one, self._name), zeros)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{self._name} cannot be left out of a stage, because it does not run without its numbers: {error}"
            ) from error


def skeleton(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no memory. Keeps no reference to those of the module."""
    copy = shallow(module, type(module))
    copy.__dict__.pop("forward", None)  # one put there is bound to the module
    copy.__dict__["_compiled_call_impl"] = None
    for hooks in [value for name, value in copy.__dict__.items() if _is_hooks(name, value)]:
        hooks.clear()
    copy._parameters = {
        name: None if one is None else nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=False)
        for name, one in module._parameters.items()
    }
    copy._buffers = {
        name: None if one is None else torch.empty_like(one, device="meta") for name, one in module._buffers.items()
    }
    copy._modules = {name: None if one is None else skeleton(one) for name, one in module._modules.items()}
    if isinstance(copy, nn.RNNBase):  # its forward reads a list of its own
        copy.__dict__["_flat_weights"] = [copy._parameters.get(name) for name in copy._flat_weights_names]
    return copy


def shallow(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Another object with the same parameters, buffers and children. Hooks put on it are its own."""
    copy: nn.Module = kind.__new__(kind)
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update({name: value.copy() for name, value in copy.__dict__.items() if _is_hooks(name, value)})
    return copy


def _is_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)
