"""Lists the peak speed of devices: operations a second, dense, in bfloat16 (or fp16, where it has no other). Pure.

From the makers' data sheets. Of a device that is not listed nothing is said.
"""

PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("RTX 5090", 209.5e12),
    ("RTX 5080", 112.6e12),
    ("RTX 4090", 165.2e12),
    ("RTX 4080", 97.5e12),
    ("RTX 3090", 71e12),
    ("RTX 3080", 59.5e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)
"""The first whose name is part of the device's, as a word."""
OTHERS = {"Ti", "SUPER", "Laptop", "Max", "D"}
"""A word after the name by which it is another device, whose peak is not listed."""


def peak_of(device: str) -> float | None:
    """`device`: its name, and perhaps more, as a worker's kind has it."""
    words = f" {device.replace(',', ' ').replace('-', ' ').replace(';', ' ')} "
    for name, peak in PEAKS:
        _, found, after = words.partition(f" {name} ")
        if found:
            return None if OTHERS.intersection(after.split()[:1]) else peak
    return None
