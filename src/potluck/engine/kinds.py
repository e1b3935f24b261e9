"""Names what a worker computes with: workers of one kind compute the same bits from the same bits."""

import contextlib
import platform
from pathlib import Path

import torch

from potluck.devices import name_of


def kind_of(device: torch.device, ranks: int = 1) -> str:
    """Workers of one kind compute the same bits from the same bits.

    Those of which only what follows the semicolon is the same do so in an update: threads and the make of a processor
    change the bits of gradients, and nothing that an optimizer computes number by number (decision 0033). So does how
    many ranks compute a slice together.
    """
    together = f", {ranks} ranks" if ranks > 1 else ""
    if device.type != "cpu":
        name = name_of(device)
        return f"{name}{together}; " * (ranks > 1) + f"{name}, torch {torch.__version__}"
    processor = platform.machine()
    with contextlib.suppress(OSError):  # not every system has it: then the architecture is the name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    fused = "" if torch.backends.cpu.get_cpu_capability() != "DEFAULT" else " without AVX2"
    update = f"{platform.machine()}{fused}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' if threads > 1 else ''}{together}; {update}"
