"""Threads that put and get while the caller computes. They never keep a program alive that wants to end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """At most `count` threads, made as they are needed, which take work in order.

    They are daemons, unlike a ThreadPoolExecutor's: one that waits for a dead worker's object would else hold up the
    end of a program that forgot to close its channel.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._lock = threading.Lock()

    def start(self, work: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put((done, work))
        return done

    def close(self) -> None:
        """Waits until all that was started is done."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        while (taken := self._work.get()) is not None:
            done, work = taken
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            del taken, done, work  # else a thread without work would hold the last tensor
            with self._lock:
                self._busy -= 1
