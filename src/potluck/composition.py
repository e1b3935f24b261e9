"""Composes a run from the answers that it is given; or says why that cannot be, as a sentence. Pure: knows no torch.

Three answers are independent of each other: where one replica's bytes live (strategy, stages), when replicas agree
(policy), and over what they talk (a group, a store, a host). This is the only place that looks at more than one of
them, and the only one that asks which kind an answer is. `tests/unit/test_composition.py` walks the whole table, which
is printed in docs/composition.md.
"""

from dataclasses import dataclass, replace
from typing import get_args

from potluck.agree.policy import ApplyPolicy, Auto, Sync, Windowed
from potluck.coded_numbers import AskedWire, Wire
from potluck.errors import ConfigError
from potluck.sharding.strategy import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
from potluck.stages.protocol import DataStore, Stages
from potluck.words import plural

MOST_RANKS = 30
"""The most ranks of one worker of a host: each writes two files of a state that travels, the first three more, and 64
are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The answers that a run is made from, and where it runs."""

    policy: ApplyPolicy = Sync()
    strategy: ShardingStrategy = NoShard()
    stages: Stages | None = None
    wire: AskedWire = "fp32"
    """Form in which replicas send each other their numbers."""
    world: int = 1
    """Workers of the run. Under a host that is not known: then the ranks of this worker, one machine's."""
    has_host: bool = False
    offload_optimizer: bool = False
    on_gpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """The parts that are built. `replicas * stages * ranks_per_stage` is the number of workers."""

    window: Windowed | None
    """Replicas step by themselves, and agree once a window by this policy; none: all workers take each step as one."""
    replicas: int
    """Under a host: how many there are is not known, and this is 1."""
    stages: int
    """Parts into which each replica's layers are cut, each held by other ranks; 1: it is not cut."""
    ranks_per_stage: int
    """Ranks that hold one stage of one replica between them."""
    split: ShardingStrategy | None
    """How they do; none: each rank has all of it."""
    splits_all: bool = False
    """Whether `split` goes over all workers that hold a stage: there is one replica, and no nodes within it."""
    weights: tuple[tuple[float, ...], ...] = ()
    """Weights of the ranks that hold each stage, where `split` has weights."""
    shares: tuple[float, ...] = ()
    """The part of each batch that each pipeline of workers gets, if that is fixed."""
    is_measured: bool = False
    """Whether those parts follow measured speeds."""
    wire: Wire = "fp32"
    """Form in which what replicas agree on travels: gradients, or what a window changed."""
    wire_is_measured: bool = False
    """Whether `wire` is only how the run begins."""

    @property
    def node_size(self) -> int:
        """Ranks side by side that hold one stage of one replica between them; those of `splits_all` are no node."""
        return 1 if self.splits_all else self.ranks_per_stage

    def split_of(self, stage: int) -> ShardingStrategy | None:
        """Return the split with the weights of those alone who hold this stage."""
        if not self.weights or not isinstance(self.split, FullShard | ShardGradOp):
            return self.split
        return replace(self.split, weights=self.weights[stage])


def settled(wanted: Wanted) -> Wanted:
    """Auto is Sync where there is one replica: what is left to choose is between one way and none."""
    if not isinstance(wanted.policy, Auto) or wanted.has_host:
        return wanted
    strategy, stages, each = wanted.strategy, wanted.stages, 1
    if isinstance(strategy, HybridShard):
        each = strategy.intra_node_size
    if stages is not None:
        each *= stages.count or max(1, wanted.world // each)
    is_one = isinstance(strategy, FullShard | ShardGradOp) or wanted.world <= each
    return replace(wanted, policy=Sync()) if is_one else wanted


def compose(wanted: Wanted) -> Composition:
    """Raises ConfigError for what cannot be."""
    wanted = settled(wanted)
    if wanted.wire not in get_args(AskedWire):
        raise ConfigError(f"wire must be one of {', '.join(get_args(AskedWire))}, not {wanted.wire!r}.")
    if wanted.has_host:
        composed = _under_host(wanted)
    else:
        composed = _in_stages(wanted, wanted.stages) if wanted.stages is not None else _over_group(wanted)
    if wanted.wire != "auto":
        return replace(composed, wire=wanted.wire)
    is_measured = composed.window is None and not wanted.has_host and not _meets_in_store(wanted)
    is_alone = wanted.world == 1 and not wanted.has_host
    return replace(
        composed, wire="fp32" if is_measured or is_alone else "int4", wire_is_measured=is_measured and not is_alone
    )


def _meets_in_store(wanted: Wanted) -> bool:
    return wanted.stages is not None and isinstance(wanted.stages.protocol, DataStore)


def check_data(
    wanted: Wanted, *, has_data: bool, has_loss: bool, micro_size: int | None, slices: int | None
) -> int | None:
    """Refuse what prepare() cannot train on. Returns how many rows go through the model at once."""
    policy, stages = wanted.policy, wanted.stages
    if stages is not None:
        return _check_data_of_stages(stages, has_all=has_data and has_loss, micro_size=micro_size)
    if not has_data and wanted.has_host:
        raise ConfigError("Under a host, give prepare() the dataset and a batch_size: its rows are shared out there.")
    if not has_data and not policy.steps_together:
        raise ConfigError(
            f"Under {type(policy).__name__} each worker does as many batches as it can, so they must come from one"
            " dataset. Pass it to prepare(), and iterate over the loader that it gives."
        )
    if slices is not None and wanted.has_host and not isinstance(policy, Sync) and not policy.may_step_together:
        raise ConfigError(
            f"batch.slices cuts a batch on which all workers step together, as under the Sync policy. Under"
            f" {type(policy).__name__} each gets rows by its speed: leave batch.slices out."
        )
    return micro_size


def _check_data_of_stages(stages: Stages, *, has_all: bool, micro_size: int | None) -> int | None:
    if not has_all:
        raise ConfigError(
            "A model that is cut into stages is prepared with its data and its loss function: prepare(model,"
            " optimizer, dataset, batch_size=..., loss=loss_of), where loss_of(model, batch) gives the mean loss."
        )
    wanted = stages.micro_batch_size
    if micro_size is not None and micro_size != wanted:
        told = "whole batches" if wanted is None else f"micro-batches of {plural(wanted, 'row')}"
        raise ConfigError(
            f"stages.protocol asks for {told}, and batch.micro_size for {plural(micro_size, 'row')}. Leave"
            " out the latter: stages.protocol.micro_batch_size says how a batch is cut."
        )
    return wanted


def ranks_per_worker(strategy: ShardingStrategy, here: int, asked: int | None = None) -> int:
    """Under a host: how many processes of one machine are one worker. `here`: where that is the machine's affair;
    `asked`: by its owner."""
    if not isinstance(strategy, NoShard | HybridShard):
        return here
    ranks = strategy.intra_node_size if isinstance(strategy, HybridShard) else 1
    if asked not in (None, ranks):
        why = f"has an intra_node_size of {ranks}" if isinstance(strategy, HybridShard) else "keeps a replica on one"
        raise ConfigError(
            f"--ranks is {asked}, and {type(strategy).__name__} {why}. Leave out --ranks, or use FullShard or"
            " ShardGradOp, with which each worker has as many ranks as its machine gives it."
        )
    return ranks


def _over_group(wanted: Wanted) -> Composition:
    policy, strategy, world = wanted.policy, wanted.strategy, wanted.world
    _check_offload(wanted, strategy)
    each = _node_size(strategy, world)
    if isinstance(policy, Sync):
        splits_all = isinstance(strategy, FullShard | ShardGradOp)
        each = world if splits_all else each
        return Composition(
            window=None,
            replicas=world // each,
            stages=1,
            ranks_per_stage=each,
            split=None if isinstance(strategy, NoShard) else strategy,
            splits_all=splits_all,
            shares=_shares(policy, world),
            is_measured=_is_measured(policy),
        )
    _check_replicas(policy, strategy, world)
    return Composition(
        window=policy,
        replicas=world // each,
        stages=1,
        ranks_per_stage=each,
        split=FullShard() if each > 1 else None,
    )


def _in_stages(wanted: Wanted, stages: Stages) -> Composition:
    policy, strategy, world = wanted.policy, wanted.strategy, wanted.world
    is_whole = isinstance(strategy, NoShard) or (isinstance(strategy, HybridShard) and strategy.intra_node_size == 1)
    _check_fit(wanted, stages, is_whole=is_whole)
    each = strategy.intra_node_size if isinstance(strategy, HybridShard) else 1
    workers = stages.count or max(1, world // each)
    if world % (workers * each):
        split = f", each split over {each} (intra_node_size)" if each > 1 else ""
        raise ConfigError(
            f"{plural(world, 'worker')} cannot hold replicas of {plural(workers, 'stage')}{split}. Start a"
            f" multiple of {plural(workers * each, 'worker')}, or change stages.count."
        )
    replicas = world // (workers * each)
    if isinstance(policy, Sync):
        splits_all = isinstance(strategy, FullShard | ShardGradOp)
        return Composition(
            window=None,
            replicas=1 if splits_all else replicas,
            stages=workers,
            ranks_per_stage=replicas if splits_all else each,
            split=None if is_whole else strategy,
            splits_all=splits_all,
            weights=_weights_of_stages(strategy, world, workers),
            shares=_shares(policy, world // workers),
            # A worker that is killed and started again there has not measured what the others have.
            is_measured=_is_measured(policy) and not isinstance(stages.protocol, DataStore),
        )
    if isinstance(strategy, FullShard | ShardGradOp):
        raise ConfigError(
            f"{_only_one(policy)}: {type(strategy).__name__} splits each stage over all workers that hold it. Use"
            " NoShard, or HybridShard with an intra_node_size that is smaller than their number, or the policy Sync."
        )
    if replicas == 1 and world > 1:
        size = workers * each
        raise ConfigError(
            f"There is one replica of {plural(workers, 'stage')}, and nothing to average with. Start a multiple"
            f" of {size} workers, such as {2 * size}, or use the policy Sync."
        )
    return Composition(
        window=policy,
        replicas=replicas,
        stages=workers,
        ranks_per_stage=each,
        split=None if is_whole else FullShard(),
    )


def _under_host(wanted: Wanted) -> Composition:
    policy, strategy = wanted.policy, wanted.strategy
    if wanted.stages is not None:
        raise ConfigError(
            "Stages are what a host cannot lead: its workers each have a whole replica and may go at any time, and"
            " stages need each other. Start them with potluck run or potluck train; workers that have no connection"
            ' meet in a store, with stages.protocol.kind = "datastore".'
        )
    ranks = ranks_per_worker(strategy, wanted.world)
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"A worker of {ranks} ranks is more than a host takes, which is {MOST_RANKS}. Choose a smaller"
            f" {'intra_node_size' if isinstance(strategy, HybridShard) else '--ranks'}."
        )
    if isinstance(strategy, FullShard | ShardGradOp):
        _check_one_worker(wanted, strategy, ranks)
    split = FullShard() if isinstance(strategy, HybridShard) else strategy
    return Composition(
        window=None if isinstance(policy, Sync) else policy,
        replicas=1,
        stages=1,
        ranks_per_stage=ranks,
        split=split if ranks > 1 else None,
    )


def _check_one_worker(wanted: Wanted, strategy: FullShard | ShardGradOp, ranks: int) -> None:
    """Under a host: what a strategy says of ranks is said of those of each worker."""
    if strategy.weights and strategy.weights != "memory" and len(strategy.weights) != ranks:
        raise ConfigError(
            f"strategy.weights has {plural(len(strategy.weights), 'number')}, and this worker {plural(ranks, 'rank')}."
            ' Give each of its ranks one, start it with as many by --ranks, or use weights="memory".'
        )
    _check_offload(wanted, strategy)


def _check_fit(wanted: Wanted, stages: Stages, *, is_whole: bool) -> None:
    if wanted.offload_optimizer:
        raise ConfigError("step.offload_optimizer does not go with stages. Leave it out, or cut into more stages.")
    if stages.schedule == "zero-bubble" and not is_whole:
        raise ConfigError(
            "The schedule zero-bubble cuts backwards in two, of which a split stage would not hear. Use 1f1b, or"
            " NoShard."
        )
    if isinstance(stages.protocol, DataStore) and not is_whole:
        raise ConfigError(
            "Stages that meet in a store have no process group, over which a stage could be split. Use NoShard, or the"
            " protocol Pipeline."
        )


def _check_offload(wanted: Wanted, strategy: ShardingStrategy) -> None:
    if wanted.offload_optimizer and wanted.on_gpu and isinstance(strategy, FullShard) and strategy.weights:
        raise ConfigError(
            "step.offload_optimizer does not go with FullShard's weights. Leave one of them out, or use"
            " ShardGradOp(weights=...)."
        )


def _only_one(policy: ApplyPolicy) -> str:
    return f"{type(policy).__name__} averages replicas, and there is only one"


def _node_size(strategy: ShardingStrategy, world: int) -> int:
    """How many ranks hold one replica together, if not all of them do."""
    if not isinstance(strategy, HybridShard):
        return 1
    size = strategy.intra_node_size
    if world % size:
        raise ConfigError(
            f"strategy: a world of {world} ranks is no multiple of intra_node_size, which is {size}. Start a multiple"
            f" of {size} workers, or choose an intra_node_size that divides {world}."
        )
    return size


def _check_replicas(policy: ApplyPolicy, strategy: ShardingStrategy, world: int) -> None:
    """Where all ranks hold one replica there is nothing to average. One rank alone is one: it just steps."""
    if world == 1 or isinstance(strategy, NoShard):
        return
    if not isinstance(strategy, HybridShard):
        raise ConfigError(
            f"{_only_one(policy)}: {type(strategy).__name__} splits it over all {world} workers. Use HybridShard with"
            f" an intra_node_size that is smaller than {world} and divides it, or the policy Sync."
        )
    if (size := strategy.intra_node_size) == world:
        raise ConfigError(
            f"{_only_one(policy)}: HybridShard with an intra_node_size of {size} makes one node of all {world}"
            f" workers. Start {2 * size} or more, choose a smaller intra_node_size, or use the policy Sync."
        )


def _shares(policy: Sync, pipelines: int) -> tuple[float, ...]:
    if policy.shares and len(policy.shares) != pipelines:
        raise ConfigError(
            f"policy.shares has {plural(len(policy.shares), 'number')}, and the run {plural(pipelines, 'worker')}."
        )
    return policy.shares


def _is_measured(policy: Sync) -> bool:
    return policy.balance and not policy.shares


def _weights_of_stages(strategy: ShardingStrategy, world: int, workers: int) -> tuple[tuple[float, ...], ...]:
    """List the weights of all who hold each stage, in the order of their ranks."""
    if not isinstance(strategy, FullShard | ShardGradOp) or not strategy.weights or strategy.weights == "memory":
        return ()
    if len(strategy.weights) != world:
        raise ConfigError(
            f"strategy.weights has {plural(len(strategy.weights), 'number')}, and the run"
            f" {plural(world, 'worker')}. Give each worker its own, also where they hold different stages."
        )
    weights_of_stages = [tuple(map(float, strategy.weights[stage::workers])) for stage in range(workers)]
    if empty := [str(stage) for stage, weights in enumerate(weights_of_stages) if not sum(weights)]:
        raise ConfigError(
            f"strategy.weights is 0 for every worker that holds stage {empty[0]}. Give one of them a part."
        )
    return tuple(weights_of_stages)
