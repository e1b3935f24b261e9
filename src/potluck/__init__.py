"""Potluck trains one PyTorch model on whatever machines people bring. The public names, and nothing else.

They are found when they are first used, so that `import potluck`, and the command line, do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck import errors, events
    from potluck.agree.elche import ElChe
    from potluck.agree.policy import ApplyPolicy, Async, Auto, Cadence, Sync
    from potluck.data.loader import Loader
    from potluck.data.plan import BatchConfig
    from potluck.engine.engine import Engine
    from potluck.engine.start import init
    from potluck.replica.precision import StepConfig
    from potluck.save.checkpoint import CheckpointConfig
    from potluck.sharding.optimizer_shard import OptimizerShard
    from potluck.sharding.splitting import shard
    from potluck.sharding.strategy import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
    from potluck.sharding.united_optimizers import JointOptimizer
    from potluck.sharding.zero import ShardedOptimizer
    from potluck.stages.protocol import CommunicationProtocol, DataStore, Direct, Pipeline, Stages, from_json, to_json
    from potluck.train.recipe import RunConfig
    from potluck.train.schedule import ScheduleConfig
    from potluck.train.trainer import FitConfig, Trainer

__version__ = "0.1.0"

_HOMES = {
    "agree.elche": ("ElChe",),
    "agree.policy": ("ApplyPolicy", "Async", "Auto", "Cadence", "Sync"),
    "data.loader": ("Loader",),
    "data.plan": ("BatchConfig",),
    "engine.engine": ("Engine",),
    "engine.start": ("init",),
    "replica.precision": ("StepConfig",),
    "save.checkpoint": ("CheckpointConfig",),
    "sharding.optimizer_shard": ("OptimizerShard",),
    "sharding.splitting": ("shard",),
    "sharding.strategy": ("FullShard", "HybridShard", "NoShard", "ShardGradOp", "ShardingStrategy"),
    "sharding.united_optimizers": ("JointOptimizer",),
    "sharding.zero": ("ShardedOptimizer",),
    "stages.protocol": ("CommunicationProtocol", "DataStore", "Direct", "Pipeline", "Stages", "from_json", "to_json"),
    "train.recipe": ("RunConfig",),
    "train.schedule": ("ScheduleConfig",),
    "train.trainer": ("FitConfig", "Trainer"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ApplyPolicy",
    "Async",
    "Auto",
    "BatchConfig",
    "Cadence",
    "CheckpointConfig",
    "CommunicationProtocol",
    "DataStore",
    "Direct",
    "ElChe",
    "Engine",
    "FitConfig",
    "FullShard",
    "HybridShard",
    "JointOptimizer",
    "Loader",
    "NoShard",
    "OptimizerShard",
    "Pipeline",
    "RunConfig",
    "ScheduleConfig",
    "ShardGradOp",
    "ShardedOptimizer",
    "ShardingStrategy",
    "Stages",
    "StepConfig",
    "Sync",
    "Trainer",
    "errors",
    "events",
    "from_json",
    "init",
    "shard",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # it needs libraries that not everybody has
        return import_module("potluck.integrations.hf")
    if name == "Outer":
        from potluck.agree.policy import OUTER
        from potluck.errors import ConfigError

        raise ConfigError(OUTER)
    if name in ("errors", "events"):
        return import_module(f"potluck.{name}")
    if name not in _MODULES:
        raise AttributeError(f"potluck has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"potluck.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
