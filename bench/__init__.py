"""Potluck side by side with bare PyTorch code: `python -m bench [NAME ...]`, from the repository root.

step_time   the time of a step, against bare DistributedDataParallel
memory      the peak memory of a rank, against the same
startup     from the command to the first finished step, against torchrun
h200        tokens per second on one GPU, against a bare loop; only when it is named

Machines are noisy, so both sides are always measured in one run, in turns, and what is reported is their ratio.
"""
