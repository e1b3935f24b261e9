"""The content of a row, in a few numbers: exactly, but for floats, which two machines may have a little apart."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.agree.terms import Mark

MOST_NUMBERS = 1 << 18
"""The most numbers that are read of one array of a row; of a larger one, every second, third, and so on."""


def mark_of(value: Any, most: int = MOST_NUMBERS) -> Mark | None:
    content = _Content(most)
    try:
        content.take(value)
    except Exception:  # what has no content, or has none on this machine
        return None
    return content.mark()


class _Unknown(Exception):
    """No content that would be the same on another machine."""


class _Content:
    """Digests nested containers: exactly, but for floats."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._exact = hashlib.sha256()
        self._floats: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def take(self, value: Any) -> None:
        match value:
            case Tensor():
                self._take_array(self._as_array(value))
            case np.ndarray() | np.generic():
                self._take_array(np.asarray(value))
            case None | bool() | int() | str():
                self._note("value", str(int(value) if isinstance(value, bool) else value).encode())
            case float() | complex():
                self._take_array(np.asarray(value))
            case bytes() | bytearray() | memoryview():
                self._note("bytes", bytes(value))
            case Mapping():
                self._note("table", str(len(value)).encode())
                for key in sorted(value, key=str):
                    self._note("key", str(key).encode())
                    self.take(value[key])
            case list() | tuple():
                self._note("list", str(len(value)).encode())
                for item in value:
                    self.take(item)
            case _ if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
                self._take_array(np.asarray(value))
            case _:
                raise _Unknown(type(value).__name__)

    def mark(self) -> Mark:
        numbers = np.concatenate(self._floats) if self._floats else np.zeros(0)
        finite = np.isfinite(numbers)
        if not finite.all():
            self._note("not finite", str(int((~finite).sum())).encode())
            numbers = np.where(finite, numbers, 0.0)
        return [self._exact.hexdigest()[:32], _sketch(numbers) if self._floats else []]

    def _note(self, kind: str, data: bytes) -> None:
        self._exact.update(f"{kind} {len(data)}:".encode())
        self._exact.update(data)

    def _as_array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Take the numbers of a large tensor that are looked at; its shape is noted separately."""
        self._note("tensor", str(list(tensor.shape)).encode())
        flat = tensor.detach().to_dense().reshape(-1)
        flat = flat[:: self._every(len(flat))].to("cpu")
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        return np.asarray(flat.to(torch.float64 if flat.is_floating_point() else torch.int64).numpy())

    def _every(self, size: int) -> int:
        return max(1, -(-size // self._most))

    def _take_array(self, array: np.ndarray[Any, Any]) -> None:
        kind = array.dtype.kind
        if kind not in "biufcmM":
            self.take(array.tolist())
            return
        self._note("array", str(list(array.shape)).encode())
        flat = array.reshape(-1)[:: self._every(array.size)]
        if kind == "c":
            flat, kind = np.stack([flat.real, flat.imag]).reshape(-1), "f"
        if kind == "f":
            self._floats.append(flat.astype(np.float64))
        else:
            self._note("whole", (flat.view("<i8") if kind in "mM" else flat.astype("<i8")).tobytes())


def _sketch(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Sketch numbers by their mean, their size, and a sum in which each has a weight of its own: alike only for like
    numbers.

    On a scale on which a large number does not hide the small ones beside it.
    """
    if not len(numbers):
        return [0.0, 0.0, 0.0]
    scaled = np.arcsinh(numbers)
    weights = np.cos(np.arange(len(numbers)) * (math.pi * (math.sqrt(5) - 1)))
    size = math.sqrt(float(np.mean(scaled**2)))
    return [float(np.mean(scaled)), size, float(scaled @ weights) / math.sqrt(len(numbers))]
