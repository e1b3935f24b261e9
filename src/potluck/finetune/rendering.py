"""Chat templates are rendered in a process of their own, with limits of time and of memory. Imports no torch.

A template is a program that comes with a model. Its sandbox keeps it from files, and from nothing else: two loops, one
in the other, or a text that doubles itself, would hold or fill the worker. What renders it here is ended in its place.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.system import resource
from potluck.words import first_line

MOST_CPU_S = 10
"""Processor time of one rendering: a busy machine takes none of it away."""
MOST_BYTES = 512 << 20
"""Memory of all renderings, beyond what the libraries take."""
MOST_LETTERS, MOST_TIMES = 1 << 20, 16
"""The most letters that may be written, and as many again for each that was given."""


class TemplateError(Exception):
    """A template says in its own words what it does not take."""


class TemplateProcess:
    """A child that renders templates: started with the first one, and again after one that it did not survive."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # answers come in the order of the requests, one at a time

    def render(self, **arguments: Any) -> str:
        """Render one conversation as transformers' `render_jinja_template` does."""
        request = json.dumps(arguments, default=str)
        with self._lock:
            answer = self._ask(request)
        if "text" in answer:
            return str(answer["text"])
        if answer["kind"] == "MemoryError":
            raise _beyond(f"more than {MOST_BYTES >> 20} MiB of memory")
        raise TemplateError(answer["error"])

    def _ask(self, request: str) -> dict[str, Any]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "potluck.finetune.rendering", str(MOST_CPU_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its code says why
            child.stdin.write(request.encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._child = None
        code = child.wait()
        child.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # closing writes what is left, to a child that has ended
            child.stdin.close()
        if code == -getattr(signal, "SIGXCPU", 0):
            raise _beyond(f"more than {MOST_CPU_S} s of processor time")
        raise _beyond(f"what it was given, and ended with {code}")


def _beyond(what: str) -> ConfigError:
    return ConfigError(
        f"The model's chat template took {what} for one conversation, and was stopped. Take another model, or give rows"
        " of text in place of chats."
    )


template_process = cache(TemplateProcess)


def _serve(most_cpu_s: int) -> None:
    """Render what is asked for on standard input until its end. Only the child runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, with whom our input ends
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin.buffer:
        _limit_time(most_cpu_s)
        try:
            asked = json.loads(line)
            text = render_jinja_template(**asked)[0][0]
            most = MOST_LETTERS + MOST_TIMES * len(line)
            if len(text) > most:
                raise ValueError(f"it writes {len(text):,} letters, and at most {most:,} are taken")
            answer = json.dumps({"text": text})
        except Exception as error:
            text = ""  # the memory of what was written is needed to tell of it
            answer = json.dumps({"kind": type(error).__name__, "error": first_line(error)[:1000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():
        have = int(pages.read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, have + MOST_BYTES)


def _limit_time(most_cpu_s: int) -> None:
    """The kernel ends this process, since no code of ours runs while a template does."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + most_cpu_s)


def _limit(what: int, most: int) -> None:
    """The limit that an owner of the machine has set may be lower, and stays."""
    assert resource is not None
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
