"""Lines of the flight recorder: an input and what was decided on it, as JSON, and the input again. Pure.

A message keeps its figures and short texts. Of bytes only their number is kept, and nothing of what a model writes.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.events import Sampled
from potluck.fleet.effects import Effect, Emit, Send
from potluck.fleet.frozen import freeze, thaw
from potluck.wire.messages import MESSAGES, Kind, Message, layout

_HIDDEN = ("prompt", "text", "recipe")
"""Texts that are long, or nobody's business: no decision depends on them."""
_OF_PEER = ("closed", "payload", "bad", "loss", "taken", "heard")
_KINDS = {kind.__name__: kind for kind in MESSAGES}
_ARRAYS = {Kind.F32S: "<f4", Kind.U32S: "<u4", Kind.F64S: "<f8"}


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
    return "" if name in _HIDDEN else value


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
    if kind in _ARRAYS:
        return np.frombuffer(b64decode(value), _ARRAYS[kind])
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
