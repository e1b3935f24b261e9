"""Potluck side by side with bare PyTorch code: `python -m bench [NAME ...]`, from the repository root.

step_time   the time of a step, against bare DistributedDataParallel
memory      the peak memory of a rank, against the same
startup     from the command to the first finished step, against torchrun
star        gradients through the server and back, against bare sockets and against Gloo's all-reduce
crowd       the time of a step while idle workers and strangers crowd the server, against the same alone
coordinator_memory   what the server holds, for any number of workers
pause       how long a kill -9 of a worker, or of the server, holds up the others
elastic_step   the time of a step that a server leads, against bare DistributedDataParallel
h200        tokens per second on one GPU, against a bare loop; only when it is named

testbed/ makes real unequal machines of this one, for whichever needs them; `python -m bench.testbed` runs any command
on such machines.

Machines are noisy, so both sides are always measured in one run, in turns, and what is reported is their ratio.
"""
