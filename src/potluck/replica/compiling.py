"""torch.compile in a run: how often it compiles, and what a person hears while it does.

A model's first step waits for the compiler, for seconds or minutes; ranks of one machine wait for it side by side, each
with its own, because none can use the other's before it is done. So it is said, and no step compiles again only because
it has fewer rows than the one before.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SAY_EVERY_S = 20.0


class Compiling:
    """Hears from torch when it begins to compile and when it has ended, until it is closed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        from torch._dynamo.callback import callback_handler

        self._say = say
        self._handler = callback_handler
        self._has_begun = False
        self._ended = threading.Event()
        self._handler.register_start_callback(self._on_start)
        self._handler.register_end_callback(self._on_end)

    def _on_start(self, *told: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._say("Compiling the model; the steps that wait for it take longer, from seconds to minutes.")
        self._ended = threading.Event()
        # A thread, since the main one compiles, and a person should hear that it is still at it.
        threading.Thread(target=self._wait, args=(self._ended, time.monotonic()), daemon=True).start()

    def _on_end(self, *told: Any) -> None:
        self._ended.set()

    def _wait(self, ended: threading.Event, started: float) -> None:
        has_said = False
        while not ended.wait(SAY_EVERY_S):
            has_said = True
            self._say(f"Still compiling, for {time.monotonic() - started:.0f} s.")
        if has_said:
            self._say(f"Compiled in {time.monotonic() - started:.0f} s.")

    def close(self) -> None:
        self._ended.set()
        self._handler.remove_start_callback(self._on_start)
        self._handler.remove_end_callback(self._on_end)


class AnyRows:
    """Calls a compiled module, which is compiled for any number of rows once that is wanted, and else for each."""

    def __init__(self, module: nn.Module) -> None:
        self.is_wanted = False
        self._compiled = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_wanted:
            from torch._dynamo import maybe_mark_dynamic

            for tensor in [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()][:1]:
                maybe_mark_dynamic(tensor, 0)
        return self._compiled(*args, **kwargs)  # type: ignore[misc]


def expect_any_rows(model: nn.Module) -> None:
    """Batches will have different numbers of rows: the first compilation is to be for all of them."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, AnyRows):
            module._compiled_call_impl.is_wanted = True
