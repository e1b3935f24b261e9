"""Other people's objects that a run changes: which, why, and when it is undone; and how an attribute is replaced.

Undone by fleet.close(), where this worker has all of the model:
- an optimizer's step, zero_grad and add_param_group, and a hook on its step (replica/optimizer_adapter.py): what a loop
  of plain PyTorch calls out of habit does no harm, or is refused with what to call instead;
- its groups and its state, with offload_optimizer (the same file): it steps copies in host memory;
- hooks on gradients (replica/buckets.py, engine/slices.py): sums start while the backward still runs;
- a scheduler's class (engine/scheduled.py): the run steps it. An attribute of its own would be saved with it;
- a model's save_pretrained (engine/checkpointing.py): it saves what all workers hold.

Not undone:
- a model's state_dict and load_state_dict (engine/checkpointing.py), its parameters' classes and hooks on its modules
  (sharding/), and the optimizer of a model that is split: it stays split, and no part of it may pass for the whole;
- a model's class and modules, where it is cut into stages (stages/): it stays cut;
- forward of a model or of its blocks (replica/precision.py), for autocast and recomputing: it computes as it was
  trained;
- parameters that are bf16, under a host (replica/precision.py): they are float32, and bf16 while a forward runs. It
  looks at the interpreter's frames for a forward that Ctrl-C has ended, of which torch tells no hook;
- Accelerate's PartialState.__init__ (integrations/hf.py): TrainingArguments would make a process group of their own.
  For anybody else it does what it did.

For a while: how torch sends small tensors, in a process that fetches rows, and whether it tells of one that died
(data/rows.py); a Lightning module's log, while rows that are somebody else's are computed
(integrations/lightning.py).
"""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


def replace_attribute(owner: object, name: str, value: Any) -> Callable[[], None]:
    """Give one object an attribute of its own. Call what is returned to undo it, unless another came in its place."""
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    attributes[name] = value

    def undo() -> None:
        if attributes.get(name) is value:
            del attributes[name]
            if before is not _ABSENT:
                attributes[name] = before

    return undo
