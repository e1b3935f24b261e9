"""Devices: which one this worker computes on, and what each kind does in its own way.

AMD's cards are torch's "cuda" too, under ROCm. Apple's (MPS) have no float64, and no process group takes their tensors.
"""

import os
import platform

import torch
from torch import Tensor

from potluck.environment import processor


def choose_device(*, is_whole: bool = True) -> torch.device:
    """This rank's GPU, shared round robin when there are more ranks than GPUs; else the CPU.

    `is_whole`: this worker has a whole replica of its own. Parts of one are not kept on Apple's GPUs: see above.
    """
    if torch.cuda.is_available() and (count := torch.cuda.device_count()):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % count)
        torch.cuda.set_device(device)
        return device
    return torch.device("mps") if is_whole and torch.backends.mps.is_available() else torch.device("cpu")


def travels(device: torch.device) -> bool:
    """Whether process groups take a tensor that is there."""
    return device.type in ("cpu", "cuda")


def synchronize(device: torch.device) -> None:
    """Waits for what was launched: the time that work took would else be the time to launch its kernels."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def wide(tensor: Tensor) -> Tensor:
    """Convert to float64; where its device has none, in host memory."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def seed_gpus(seed: int) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def random_states() -> dict[str, Tensor]:
    """Return the states of the GPUs' random generators."""
    states = {}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore the states of generators; those of kinds that are not here are left."""
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


def build_of_torch() -> str:
    """Say what torch was built for."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "Apple's MPS" if torch.backends.mps.is_built() else "CPU only"


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes free, and in all, of a GPU; none of a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        return max(0, most - torch.mps.driver_allocated_memory()), most
    return None


def gpus() -> dict[torch.device, str]:
    """Every GPU that torch can use here, and what it is called."""
    names = {}
    if torch.cuda.is_available():
        names = {torch.device("cuda", i): torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        names[torch.device("mps")] = "Apple GPU (MPS)"
    return names


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else gpus().get(device, "CPU")


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
    fused = "" if torch.backends.cpu.get_cpu_capability() != "DEFAULT" else " without AVX2"
    update = f"{platform.machine()}{fused}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}{together}; {update}"
