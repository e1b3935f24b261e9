"""Link: over what replicas talk. Here: a fixed process group of torch.distributed, or nobody.

A link of one answers at once, so callers never ask how many ranks there are.
Nothing that travels is pickled: only tensors and bytes.
"""

import atexit
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as rendezvous_at

from potluck.coded_numbers import Coding
from potluck.devices import travels
from potluck.environment import ONLY, PATIENCE_S, RENDEZVOUS
from potluck.errors import ConfigError, PotluckError, WorkerLost
from potluck.link.coded_sums import CodedSums
from potluck.link.whereabouts import LOOK_S, QUIET_S, GroupWatch
from potluck.sharding.collectives import Done as Done
from potluck.sharding.collectives import Pending as Pending
from potluck.tensor_bytes import from_bytes, raw, to_bytes
from potluck.waiting import wait_until

MEETING_S = 10.0
"""How long a call waits for the other ranks to make it too before a person hears of that."""


class Rows(Protocol):
    """Rows of numbers from every rank, while they are gathered."""

    def is_here(self) -> bool: ...

    def wait(self) -> list[list[float]]: ...


class Link:
    """Replicas talk over a link. By itself it is one of one, which answers at once: nothing travels or is rounded."""

    rank: int = 0
    world: int = 1

    group: dist.ProcessGroup | None = None
    """None: the default one, or no process group at all."""

    def part(self, groups: Sequence[Sequence[int]]) -> "Link":
        """A link of that group of our ranks in which we are. Every rank calls this with the same groups."""
        return self

    def start_sum(self, tensor: Tensor) -> Pending:
        """Begins to replace `tensor` by its sum over all ranks. Every rank starts the same sums in the same order."""
        return Done()

    def start_coded_sum(self, tensor: Tensor, coding: Coding) -> Pending:
        """Begin to replace a flat tensor by its sum over all ranks, of which only coded numbers travel. All ranks get
        the same bits."""
        return Done()

    def gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """Every rank's row of numbers, in order of rank."""
        return self.start_gather(row).wait()

    def start_gather(self, row: Sequence[float]) -> Rows:
        """Begin to gather every rank's row of numbers, while other things travel."""
        return Done([list(row)])

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank."""
        return [data]

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces `tensor` by rank 0's."""

    def fetch(self, numbers: Tensor, of: int) -> None:
        """Fills rank 0's bytes, flat and in host memory, with those of another rank. All ranks call this alike; of
        those who are neither, nothing is asked."""

    def meet(self, what: str, notice: Callable[[str], None]) -> None:
        """Wait until all ranks are here, if that can be seen beside what they do otherwise: so that `what`, a call that
        all must make, is not taken for another one where only some have made it. They hear of it in a sentence."""

    def within(self, call: str, after_step: int) -> AbstractContextManager[None]:
        """Note that what this rank asks of the others within belongs to a call that all must make: by that name they
        see it, if only some of them have made it."""
        return nullcontext()

    def note_call(self) -> None:
        """This rank begins what all ranks must begin alike, in the same order."""

    def end_well(self) -> None:
        """This rank has done all that it wanted to, and asks nothing more of the others."""

    def close(self) -> None:
        pass


class Alone(Link):
    """A link of one."""


class _Begun:
    def __init__(self, work: Pending | None, result: Callable[[], Any] = lambda: None) -> None:
        """`result`: called once the work has ended."""
        self._work = Done() if work is None else work
        self._result = result

    def is_here(self) -> bool:
        assert isinstance(self._work, dist.Work)
        return self._work.is_completed()

    def wait(self) -> Any:
        with _peers_may_vanish():
            self._work.wait()
        return self._result()


class _ByHost:
    """A sum of a tensor that a process group does not take: of its copy in host memory."""

    def __init__(self, tensor: Tensor, start: Callable[[Tensor], Pending]) -> None:
        self._tensor, self._host = tensor, tensor.detach().to("cpu", copy=True)
        self._work = start(self._host)

    def wait(self) -> None:
        self._work.wait()
        self._tensor.detach().copy_(self._host)


class GroupLink(Link):
    """All ranks of a process group: the default one, or a part of it."""

    def __init__(
        self,
        *,
        owned: bool,
        group: dist.ProcessGroup | None = None,
        patience_s: float = PATIENCE_S,
        watch: GroupWatch | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._owned = owned
        """Whether we made the default group, and so end it; its parts end with it."""
        self._patience_s = patience_s
        self.coded: CodedSums | None = None
        """Made with the first of them."""
        self._meetings = 0
        self._watch = watch
        """Of the default group, where it is a run's: sees whether all ranks make the same calls."""

    def part(self, groups: Sequence[Sequence[int]]) -> "GroupLink":
        assert self.group is None, "only the default group's ranks are numbered as new_group() wants them"
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            with _peers_may_vanish():
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=self._patience_s))
            own = made if self.rank in ranks else own
        assert own is not None, f"no group holds rank {self.rank}"
        return GroupLink(owned=False, group=own, patience_s=self._patience_s)

    def within(self, call: str, after_step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.calls.within(call, after_step)

    def note_call(self) -> None:
        if self._watch is not None:
            self._watch.calls.note()

    def start_sum(self, tensor: Tensor) -> Pending:
        if not travels(tensor.device):
            return _ByHost(tensor, self.start_sum)
        self.note_call()
        with _peers_may_vanish():
            return _Begun(dist.all_reduce(tensor, group=self.group, async_op=True))

    def start_coded_sum(self, tensor: Tensor, coding: Coding) -> Pending:
        if not travels(tensor.device):
            return _ByHost(tensor, lambda host: self.start_coded_sum(host, coding))
        self.note_call()
        self.coded = self.coded or CodedSums(self.group)
        with _peers_may_vanish():
            return _Begun(self.coded.start(tensor, coding))

    def start_gather(self, row: Sequence[float]) -> Rows:
        if self.world == 1:
            return Done([list(row)])
        return self._gather(torch.tensor(row, dtype=torch.float64), Tensor.tolist)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self._gather(torch.tensor(len(data)), int).wait()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = from_bytes(data)
        rows = self._gather(padded, to_bytes).wait()
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, tensor: Tensor) -> None:
        # As bytes: backends know only some types. Of numbers that do not lie end to end, a copy travels.
        self.note_call()
        flat = raw(tensor if travels(tensor.device) else tensor.cpu())
        with _peers_may_vanish():
            dist.broadcast(flat, group=self.group, group_src=0)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def start_send(self, tensor: Tensor, to: int) -> Pending:
        """Begins to send a tensor in host memory to one rank, which begins to receive it: in the same order there."""
        with _peers_may_vanish():
            return _Begun(dist.isend(tensor, group=self.group, group_dst=to) if tensor.numel() else None)

    def start_receive(self, tensor: Tensor, of: int) -> Pending:
        with _peers_may_vanish():
            return _Begun(dist.irecv(tensor, group=self.group, group_src=of) if tensor.numel() else None)

    def fetch(self, numbers: Tensor, of: int) -> None:
        if self.rank == of != 0:
            self.start_send(numbers, 0).wait()
        elif self.rank == 0 != of:
            self.start_receive(numbers, of).wait()

    def meet(self, what: str, notice: Callable[[str], None]) -> None:
        assert self.group is None, "it is the default group's store through which ranks see each other"
        store = PrefixStore(f"meeting {self._meetings}", dist.distributed_c10d._get_default_store())
        self._meetings += 1
        self.note_call()
        store.set(str(self.rank), what)

        ranks = [str(rank) for rank in range(self.world)]
        with _peers_may_vanish():
            if wait_until(lambda: store.check(ranks), MEETING_S):
                return
            them = ", ".join(rank for rank in ranks if not store.check([rank]))
            notice(
                f"{what} waits for worker {them}. It needs all workers, since each holds a part of what it gives: call"
                " it on every worker, and not on rank 0 alone."
            )
            if not wait_until(lambda: store.check(ranks), self._patience_s):
                raise ConfigError(
                    f"{what} was called on worker {self.rank}, and not on worker {them}. Call it on every worker: each"
                    " holds a part of what it gives, and only rank 0 gets the whole."
                )

    def end_well(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close(is_well=False)
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> _Begun:
        """Begin to gather every rank's tensor, and read each of them."""
        self.note_call()
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        with _peers_may_vanish():
            work = dist.all_gather(found, tensor, group=self.group, async_op=True)
        return _Begun(work, lambda: [read(each) for each in found])


_watch: GroupWatch | None = None
"""Watch over the default group of this process."""

_GONE = re.compile("closed|reset|timed out|timeout|aborted|refused|broken pipe|unreachable", re.IGNORECASE)


@contextmanager
def _peers_may_vanish() -> Iterator[None]:
    """Backends say in many words that a peer is gone; we say it in one."""
    try:
        yield
    except RuntimeError as error:
        is_loss = _tells_of_loss(error)
        # Of two calls that do not fit, one may fail before the other rank has told of its own.
        wait_s = QUIET_S + 2 * LOOK_S if "mismatch" in str(error) else 0.0
        mistake = _watch.explain(wait_s) if _watch is not None else None
        if mistake is not None:
            raise ConfigError(mistake) from error
        if not is_loss:
            raise
        raise WorkerLost(_loss(error)) from error


def _tells_of_loss(error: RuntimeError) -> bool:
    # Backends also refuse what they cannot do (a type, a shape), and that is nobody's death.
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or bool(_GONE.search(str(error)))


def _loss(error: RuntimeError) -> str:
    hint = _watch.hint() if _watch is not None else ""
    return f"Another worker stopped answering: {str(error).strip().splitlines()[0]}{hint}"


def loss_of_peer(error: BaseException) -> str | None:
    """A sentence, if an error from anywhere in a script comes from a process group that has lost a peer."""
    if not isinstance(error, RuntimeError) or not _tells_of_loss(error):
        return None
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    return (_watch.explain() if _watch is not None else None) or _loss(error)


def ask_first(link: Link, work: Callable[[], Any], kind: type[PotluckError]) -> Any:
    """Return on every rank what rank 0 finds out, as JSON. An error of this kind there is raised on all."""
    answer = {}
    if link.rank == 0:
        try:
            answer = {"answer": work()}
        except kind as error:
            answer = {"refusal": str(error)}
    heard = json.loads(link.gather_bytes(json.dumps(answer).encode())[0])
    if "refusal" in heard:
        raise kind(heard["refusal"])
    return heard["answer"]


def connect(device: torch.device, patience_s: float) -> Link:
    """Joins whatever started us: our launcher, torchrun, or a group the caller made; else we are alone."""
    if dist.is_initialized():
        return GroupLink(owned=False, patience_s=patience_s, watch=_watch_over())
    rendezvous = os.environ.get(RENDEZVOUS)
    place = placed()
    if place is None:
        return Alone()
    rank, world = place
    if ONLY in os.environ:
        raise ConfigError(
            "--only starts one worker of several, and they can only meet in a store. Cut the model into stages with"
            ' stages.protocol.kind = "datastore" and a url that all of them can reach.'
        )
    if world == 1 and rendezvous is not None:
        return Alone()
    patience = timedelta(seconds=patience_s)  # for each wait below, and each that follows: torch's own is not the run's
    with _peers_may_vanish():
        meet = rendezvous_at(f"file://{rendezvous}" if rendezvous else "env://", rank, world, timeout=patience)
        store = next(meet)[0]
        store.set_timeout(patience)
        backend = _agree_on_backend(store, rank, world, _backend(device))
        dist.init_process_group(
            backend, store=PrefixStore("potluck", store), rank=rank, world_size=world, timeout=patience
        )
        _wait_for_connections(store, rank, world)
    return GroupLink(owned=True, patience_s=patience_s, watch=_watch_over())


def _watch_over() -> GroupWatch | None:
    """GroupWatch over the default group. A process may have several of them, one after the other, in one store."""
    global _watch
    if dist.get_world_size() == 1:
        return None
    number = _watch.number + 1 if _watch is not None else 0
    store = PrefixStore(f"watch {number}", dist.distributed_c10d._get_default_store())
    _watch = GroupWatch(store, dist.get_rank(), dist.get_world_size(), number)
    atexit.register(_watch.close_at_exit)
    return _watch


def placed() -> tuple[int, int] | None:
    """This worker's rank, and how many there are, as the program that started us says; none if there was none."""
    if RENDEZVOUS not in os.environ and "RANK" not in os.environ:
        return None
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigError(
            "RANK is set but RANK and WORLD_SIZE are not both whole numbers. Start the script with"
            " `potluck run -n 2 script.py` or torchrun, or unset RANK."
        ) from None


def _agree_on_backend(store: Store, rank: int, world: int, own: str) -> str:
    """Choose a backend that all ranks can use: machines of one run may have fewer GPUs than ranks, or none, and one
    group has one backend. Ranks that each went by their own machine would wait for each other in vain."""
    store.set(f"backend/{rank}", own)
    told = {store.get(f"backend/{each}").decode() for each in range(world)}
    return own if len(told) == 1 else "gloo"


def _wait_for_connections(store: Store, rank: int, world: int) -> None:
    """Returns when all ranks are connected. One that is connected first, finds its settings refused and exits would
    break the connections of those who still make theirs: they would tell of a lost worker, and not of the settings."""
    store.set(f"connected/{rank}", "")
    for each in range(world):
        store.get(f"connected/{each}")


def _backend(device: torch.device) -> str:
    """Return the backend that this machine would choose: NCCL where each rank has a GPU of its own. It refuses two
    ranks on one; Gloo does not."""
    if device.type != "cuda":
        return "gloo"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    if dist.is_nccl_available() and ranks_here <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"
