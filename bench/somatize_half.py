"""Half of a net as a node of somatize's, and the worker that has it; see pipes.py. Needs somatize."""

import os
import threading
import time
from typing import Any

import torch
from somatize import Node, Opaque
from torch import nn

from bench.pipes import pin


class Half(Node):
    def __init__(self, blocks: nn.Module) -> None:
        self.blocks = blocks

    def forward(self, x: Any, ctx: Any) -> Any:
        return Opaque(self.blocks(x))

    def parameters(self) -> Any:
        return self.blocks.parameters()


def listen(place: int) -> None:
    """Says on which address, and serves until it is ended; it does not outlive whoever started it."""
    from somatize import worker

    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    pin(place)
    worker._read_the_codecs()
    worker.listen("127.0.0.1:0", opened=lambda where: print(where, flush=True))


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)
