"""Potluck side by side with bare PyTorch code: `python -m bench [NAME ...]`, from the repository root.

step_time   the time of a step, against bare DistributedDataParallel
memory      the peak memory of a rank, against the same
startup     from the command to the first finished step, against torchrun
checkpoint_time   saving and loading a model that is split, against torch.distributed.checkpoint
star        gradients through the server and back, against bare sockets and against Gloo's all-reduce
crowd       the time of a step while idle workers and strangers crowd the server, against the same alone
coordinator_memory   what the server holds, for any number of workers
pause       how long a kill -9 of a worker, or of the server, holds up the others
elastic_step   the time of a step that a server leads, against bare DistributedDataParallel
trackers    the time of a step while a tracker hangs, against none; only when it is named
h200        tokens per second on one GPU, against a bare loop

Workers of different speeds, on a testbed; for the machine alone, and only when they are named:

mixed_speeds   what they do together, against the sum of what each does alone at the same time
time_to_loss   the time to a validation loss, against bare DDP; and the loss after the same samples, against Sync's
following   how soon shares follow a worker that slows down
slow_host   what they do together where each reaches its host over a slow, long link, and the bytes that it takes
convergence   what the length of windows does to the loss after the same samples
h200_mixed   parts of one GPU together, against the sum of what each does alone
h200_lora    LoRA on a 4-bit base of 8 billion parameters, on parts of one GPU; and a newcomer

Sharding, only when it is named:

uneven_memory   the largest model that trains where one rank has a third of the other's memory, against fully_shard

h200 and h200_mixed also run only when they are named. uneven.py starts ranks on such machines; mixed.py has the
contenders.

testbed/ makes real unequal machines of this one, for whichever needs them; `python -m bench.testbed` runs any command
on such machines.

Machines are noisy, so both sides are always measured in one run, in turns, and what is reported is their ratio.
"""
