"""A fleet that nobody closes: a trainer's script ends when it ends."""

from collections.abc import Mapping
from typing import Any

from potluck import Engine, init
from potluck.errors import ConfigError


def check_no_stages(options: Mapping[str, Any], loop: str) -> None:
    """Refuse stages where a loop calls the model and then backward(): stages go forward and backward by turns."""
    if options.get("stages") is not None:
        raise ConfigError(
            f"{loop} computes the loss by itself, and a model that is cut into stages needs it as a function."
            " Use Hugging Face's Trainer with potluck.hf.Elastic, or a loop of fleet.train(); or split the model with"
            " strategy=potluck.FullShard()."
        )


def fleet_until_exit(**options: Any) -> Engine:
    """Call init(), and close the fleet when the script ends; if by an exception, with its reason. A host has the last
    weights then."""
    fleet = init(**options)
    fleet.close_at_exit()
    return fleet
