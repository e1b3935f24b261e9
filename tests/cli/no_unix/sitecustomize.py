"""Python as on a system without Unix's own: found first on PYTHONPATH, it takes away what Windows does not have.

Modules are refused to Potluck alone: the standard library and torch, which are another build there, may need them here.
"""

import asyncio  # noqa: F401  (it and psutil are another build there, and ask Unix here when they are imported)
import builtins
import os
import select
import signal
import socket
import sys

import psutil  # noqa: F401

UNIX = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog"}
usual_import = builtins.__import__


def import_without_unix(name, globals=None, locals=None, fromlist=(), level=0):  # type: ignore[no-untyped-def]
    if name in UNIX and (globals or {}).get("__name__", "").startswith("potluck"):
        raise ImportError(f"No module named {name!r} on this system")
    return usual_import(name, globals, locals, fromlist, level)


builtins.__import__ = import_without_unix
for owner, names in (
    (os, "killpg getuid geteuid memfd_create pread pwrite pwritev sysconf sched_getaffinity"),
    (os, "O_CLOEXEC O_NOFOLLOW O_NONBLOCK"),
    (signal, "SIGKILL SIGHUP SIGUSR1 SIGQUIT"),
    (select, "poll"),
    (socket, "AF_UNIX SO_PEERCRED TCP_USER_TIMEOUT TCP_CONGESTION MSG_DONTWAIT MSG_CMSG_CLOEXEC send_fds recv_fds"),
    (socket.socket, "sendmsg recvmsg recvmsg_into"),
):
    for each in names.split():
        if owner is socket.socket:  # it inherits them
            setattr(owner, each, None)
        elif hasattr(owner, each):
            delattr(owner, each)
print("this system has no Unix", file=sys.stderr)
