"""Names TRL's losses that cannot be computed in parts of a batch: they are refused before the first step.

A fleet weighs each part's loss by what it is a mean over, rows or tokens. A loss that adds a mean over tokens to one
over rows has no such weight, and one that compares a row with all others of its batch needs all. Imports no TRL.
"""

from typing import Any

from potluck.errors import ConfigError

GENERATING = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "AsyncGRPOTrainer", "A2POTrainer", "SDPOTrainer")
ADDS_TWO_MEANS = "adds a mean over tokens to one over rows"


def check_trainer(trainer: Any) -> None:
    """Refuse trainers that make their own batches, on any number of workers."""
    kinds = {each.__name__ for each in type(trainer).__mro__}
    for name in GENERATING:
        if name in kinds:
            raise ConfigError(
                f"{name} is not supported: it makes its batches as it generates, and a fleet cannot share those out."
                " Use SFTTrainer, DPOTrainer or RewardTrainer with potluck.hf.Elastic, or train without it."
            )


def check_loss_in_parts(trainer: Any) -> None:
    """Refuse losses that several workers, each with a part of the batch, cannot compute."""
    kinds = {each.__name__ for each in type(trainer).__mro__}
    if "ORPOTrainer" in kinds:
        why, instead = f"ORPOTrainer's loss {ADDS_TWO_MEANS}", "use DPOTrainer"
    elif "CPOTrainer" in kinds and getattr(trainer, "cpo_alpha", 1) != 0:
        why, instead = f"CPOTrainer's loss {ADDS_TWO_MEANS}", "set cpo_alpha=0, or use DPOTrainer"
    elif "DPOTrainer" in kinds and "sft" in getattr(trainer, "loss_types", ()):
        why, instead = f'DPOTrainer with the loss type "sft" {ADDS_TWO_MEANS}', 'leave "sft" out of loss_type'
    elif "KTOTrainer" in kinds and getattr(trainer, "calculate_KL", True):
        why, instead = "KTOTrainer compares each row with all others of its batch", 'set loss_type="apo_zero_unpaired"'
    else:
        return
    raise ConfigError(
        f"{why}, and workers that each compute a part of the batch would not have the numbers of one process. Train on"
        f" one worker, or {instead}."
    )
