"""Which sentences a case may be refused with, each by its beginning, and what of the case has to ask for it.

Another one is a finding: a new refusal, or an old one where nothing gives a reason for it. Knows nothing of potluck.
"""

import re

from tests.differential.cases import Case

ALLOWED: dict[str, tuple[str, ...]] = {
    # Of a loss function or a model, which use weights where a rank or a stage has none of them.
    r"\S+ was used outside of its module's forward\.": (
        *("l2", "weight", "uses", "functional", "learned", "init", "scaled", "load", "average", "clamp", "clamp-data"),
        *("clamp-after", "freeze", "eval"),
    ),
    r"What runs after the layers uses \S+, a parameter of layer": ("l2",),
    r"The loss function runs the model twice, and cut into stages": ("twice",),
    r"The loss function takes a gradient through several layers\.": ("penalty",),
    r"The loss function (ran \d+ of the model's \d+ layers|returned without running the layers of stage)": ("mixed",),
    # Of a model that has no layers to cut between or to compute again, or runs them in another way.
    r"\w+ cannot be cut into stages: it is not an nn\.Sequential": ("mixed",),
    r"checkpoint_activations found no repeated blocks in the model": ("mixed", "nested"),
    r"Layer \S+ runs out of turn": ("again", "mixed"),
    r"Layer \S+ runs within torch\.utils\.checkpoint with use_reentrant=True": ("reentrant",),
    r"\S+ got a gradient twice in one backward, as reentrant": ("reentrant",),
    r"\d+ stages need as many layers, and the model has": ("interleaved",),
    # Of gradients and hooks.
    r"A parameter's \.grad was used or changed between fleet\.backward\(\) and fleet\.step\(\)": ("clip-between",),
    r"\w+ has a step_pre_hook, which would see this (rank|stage)": ("pre-clip",),
    r"A hook was registered on \S+ after prepare\(\)": ("hook-late",),
    r"Some workers called backward\(\) with last=False": ("uneven", "halves"),
    r"The gradient of \S+ is sparse, and sparse gradients cannot be averaged": ("sparse",),
    r"\S+ is an embedding with max_norm": ("maxnorm",),
    r"A trained parameter is complex64, and what is trained travels to a host": ("complex",),
    r"A trained parameter is complex, and wire = \w+ codes real numbers": ("complex",),
    r"Layer \S+ runs within torch\.utils\.checkpoint and changes its buffers": ("recompute",),
    # Of settings that do not go together.
    r"strategy\.weights is 0 for every worker that holds stage": ("weights",),
    r"A batch of \d+ does not fit \d+ workers": ("shares",),
    r"The DataLoader gives no batch": ("drop-last",),
    r"The scheduler OneCycleLR does not go beyond step 40 of the run": ("OneCycleLR",),
    r"fleet\.ema\(\), and a Trainer's fit\.ema, follows what each rank's optimizer steps": ("ema",),
    r"(Cadence|Async) averages replicas, and there is only one": ("Cadence", "Async"),
    r"The schedule zero-bubble cuts backwards in two, of which a split stage": ("zero-bubble",),
    r"Stages that meet in a store have no process group": ("DataStore",),
    r"step\.offload_optimizer does not go with stages": ("offload_optimizer",),
}


def is_allowed(sentence: str, case: Case) -> bool:
    words = set(re.findall(r"[\w-]+", case.line()))
    return any(re.match(beginning, sentence) and words & set(asking) for beginning, asking in ALLOWED.items())
