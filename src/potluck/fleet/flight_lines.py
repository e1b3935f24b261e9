"""Lines of the flight recorder: an input and what was decided on it, as JSON, and the input again. Pure.

A message keeps its figures and short texts. Of bytes only their number is kept, since no decision depends on them, and
nothing of what a model writes, nor a secret. freeze() writes down whole machines, the coordinator itself, and thaw()
makes them again without running any code of theirs; objects that are shared stay shared.
"""

import importlib
import json
import re
import zlib
from array import array
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from potluck.errors import ConfigError
from potluck.events import Sampled
from potluck.fleet.effects import Effect, Emit, Send
from potluck.wire.codec import ARRAYS
from potluck.wire.messages import MESSAGES, Kind, Message, layout

_HIDDEN_FIELDS = ("prompt", "text", "recipe")
"""Texts that are long, or nobody's business: no decision depends on them."""
_OF_PEER = ("closed", "payload", "bad", "loss", "taken")
_KINDS = {kind.__name__: kind for kind in MESSAGES}


def line_of(now: float, name: str, what: Sequence[Any], decided: Sequence[Effect]) -> bytes:
    told = [summary(decided), digest(decided)] if decided else []
    return json.dumps([now, name, [_pack(each) for each in what], *told]).encode() + b"\n"


def _pack(value: Any) -> Any:
    if isinstance(value, Message):
        return {type(value).__name__: [_field(name, item) for name, item in vars(value).items()]}
    is_plain = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return value if is_plain else {"": freeze(value)}


def _field(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return b64encode(value.tobytes()).decode()
    if isinstance(value, bytes | memoryview):
        return len(value)
    if isinstance(value, np.generic):
        return value.item()
    return "" if name in _HIDDEN_FIELDS else value


def unpack(packed: list[Any]) -> tuple[Any, ...]:
    """Return what an input was, with as many zeros where it had bytes."""
    return tuple(map(_unpack, packed))


def _unpack(value: Any) -> Any:
    match value:
        case {"": frozen}:
            return thaw(frozen)
        case dict() if len(value) == 1 and (name := next(iter(value))) in _KINDS:
            kind = _KINDS[name]
            fields = zip(layout(kind), value[name], strict=True)
            return kind(**{each: _unpack_field(how, item) for (each, how), item in fields})
    return value


def _unpack_field(kind: Kind, value: Any) -> Any:
    if kind in ARRAYS:
        return np.frombuffer(b64decode(value), ARRAYS[kind])
    return bytes(value) if kind is Kind.BYTES else value


def input_in_words(name: str, what: Sequence[Any]) -> str:
    """Name an input and whom it is of, without what is in it: a Hello has a secret."""
    if name == "message":
        return f"{type(what[1]).__name__} of peer {what[0]}"
    return f"{name} of peer {what[0]}" if name in _OF_PEER else name


def summary(effects: Sequence[Effect]) -> str:
    """Count in words what was decided, without to whom."""
    names = Counter(_name(each) for each in effects)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in names.items())


def _name(effect: Effect) -> str:
    match effect:
        case Send():
            return f"Send {type(effect.message).__name__}"
        case Emit():
            return f"Emit {type(effect.event).__name__}"
    return type(effect).__name__


def digest(effects: Sequence[Effect]) -> int:
    """Hash all that was decided into one number."""
    texts: dict[int, str] = {}  # one message may be for a thousand
    return zlib.crc32(repr([[_name(each), *_texts(each, texts)] for each in effects]).encode("utf-8", "replace"))


def _texts(effect: Effect, texts: dict[int, str]) -> list[Any]:
    values: list[Any] = []
    for value in vars(effect).values():
        if isinstance(value, Message):
            if (text := texts.get(id(value))) is None:
                text = texts[id(value)] = repr([_field(name, item) for name, item in vars(value).items()])
            values.append(text)
        elif not isinstance(value, Sampled):
            values.append(len(value) if isinstance(value, bytes | memoryview) else value)
    return values


# Whole machines

_HIDDEN_ATTRIBUTES = ("_secret", "_recipe")
"""Attributes that are written as empty, whatever they hold."""
_HOMES = re.compile(r"potluck\.(fleet|agree|wire|events)(\.[a-z_]+)*")
_SEQUENCES = {"list": list, "set": set, "deque": deque, "frozenset": frozenset}
_PLAIN = (str, int, float, bool, type(None))


class _Freezer:
    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        """Else another object could get the identity of one that is gone."""

    def put(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Enum):
            return ["enum", _kind_name(kind), value.name]
        if kind is tuple:
            return ["tuple", *map(self.put, value)]
        if isinstance(value, bytes | memoryview):
            return ["bytes", len(value)]
        if isinstance(value, np.generic):
            return value.item()
        if (number := self._numbers.get(id(value))) is None:
            number = self._numbers[id(value)] = len(self.objects)
            self._kept.append(value)
            self.objects.append(None)
            self.objects[number] = self._put_shared(value, kind)
        return ["at", number]

    def _put_shared(self, value: Any, kind: type) -> list[Any]:
        if kind in (dict, Counter):
            return [kind.__name__, [[self.put(key), self.put(item)] for key, item in value.items()]]
        if kind.__name__ in _SEQUENCES and kind in _SEQUENCES.values():
            items = sorted(value) if isinstance(value, set | frozenset) else value
            return [kind.__name__, *map(self.put, items)]
        if isinstance(value, np.ndarray):
            return ["numpy", value.dtype.str, value.tolist()]
        if kind is bytearray:
            return ["bytearray", len(value)]
        if isinstance(value, array):
            return ["array", value.typecode, value.tolist()]
        if isinstance(value, tuple):
            return ["named", _kind_name(kind), *map(self.put, value)]
        state = {n: self.put("" if n in _HIDDEN_ATTRIBUTES else item) for n, item in _state(value).items()}
        return ["object", _kind_name(kind), state]


def freeze(value: Any) -> Any:
    """Return the value as JSON can hold it. TypeError: it is of a kind that is not known here, such as a function."""
    freezer = _Freezer()
    root = freezer.put(value)
    return [root, freezer.objects] if freezer.objects else root


def _kind_name(kind: type) -> str:
    if not _HOMES.fullmatch(kind.__module__):
        raise TypeError(f"A {kind.__module__}.{kind.__qualname__} cannot be written down.")
    return f"{kind.__module__}:{kind.__qualname__}"


def _state(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


class _Thawer:
    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        self._made: dict[int, Any] = {}

    def take(self, value: Any) -> Any:
        match value:
            case ["enum", str(name), str(member)]:
                return _kind(name)[member]
            case ["tuple", *items]:
                return tuple(map(self.take, items))
            case ["bytes", int(length)]:
                return bytes(length)
            case ["at", int(number)]:
                return self._made[number] if number in self._made else self._take_shared(number)
            case [*_]:
                raise ValueError(f"{str(value)[:80]} is nothing that was frozen")
        return value

    def _take_shared(self, number: int) -> Any:
        made: Any
        match self._objects[number]:
            case ["dict" | "Counter" as kind, [*pairs]]:
                made = self._made[number] = {} if kind == "dict" else Counter()
                made.update({self.take(key): self.take(item) for key, item in pairs})
            case ["list" | "deque" as kind, *items]:
                made = self._made[number] = _SEQUENCES[kind]()
                made.extend(map(self.take, items))
            case ["set" | "frozenset" as kind, *items]:
                made = self._made[number] = _SEQUENCES[kind](map(self.take, items))
            case ["numpy", str(kind), [*items]]:
                made = self._made[number] = np.array(items, kind)
            case ["array", str(kind), [*items]]:
                made = self._made[number] = array(kind, items)
            case ["bytearray", int(length)]:
                made = self._made[number] = bytearray(length)
            case ["named", str(name), *items]:
                made = self._made[number] = tuple.__new__(_kind(name), map(self.take, items))
            case ["object", str(name), dict(state)]:
                made = self._made[number] = object.__new__(_kind(name))
                for each, item in state.items():
                    object.__setattr__(made, each, self.take(item))
            case other:
                raise ValueError(f"{str(other)[:80]} is nothing that was frozen")
        return made


def thaw(frozen: Any) -> Any:
    """Make the value again. ValueError, KeyError, TypeError or ConfigError: it is nothing that freeze() wrote."""
    match frozen:
        case [root, [*objects]] if not isinstance(root, str):
            return _Thawer(objects).take(root)
    return _Thawer([]).take(frozen)


def _kind(name: str) -> Any:
    """Find a class of ours; it is never called."""
    home, _, word = name.partition(":")
    if not _HOMES.fullmatch(home):
        raise ConfigError(f"{name} is no part of a coordinator.")
    kind = importlib.import_module(home)
    for part in word.split("."):
        kind = getattr(kind, part)
    if not isinstance(kind, type) or kind.__module__ != home:
        raise ConfigError(f"{name} is no part of a coordinator.")
    return kind
