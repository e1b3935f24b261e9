"""CommunicationProtocol: how the stages of one model exchange activations and gradients. Pure.

    to_json(Pipeline(micro_batch_size=4)) == {"protocol": "Pipeline", "micro_batch_size": 4}
    from_json({"protocol": "DataStore"}) == DataStore()

That is the published JSON. Fields of our own (url, schedule, keep_every and so on) are keys beside it, which the
published reader passes over and this one reads back; so nothing is lost here, and no more there than it can hold.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from potluck.config import from_dict
from potluck.errors import ConfigError
from potluck.words import check_at_least

Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStore:
    """Stages exchange objects in a folder or an object store that all can reach; workers need no connection."""

    kind: ClassVar[str] = "datastore"
    schedule: ClassVar[Schedule] = "1f1b"

    url: str = ""
    """Where the store is: file:///some/folder, or s3://bucket/prefix. Empty, as published: give it before the run."""
    micro_batch_size: int | None = None
    """Rows per micro-batch, so that several objects are under way at once; None: whole batches."""
    keep_every: int = 20
    """Steps between two saves of each worker's part in the store, from where a killed worker resumes."""
    generation: int = 0
    """Raise it to start a run anew where an earlier one was cut off; what that one left is removed."""

    def __post_init__(self) -> None:
        check_at_least(1, keep_every=self.keep_every)
        if not 0 <= self.generation < 10**6:
            raise ValueError(f"generation must be at least 0 and below 1,000,000, not {self.generation}")
        scheme, separator, rest = self.url.partition("://")
        if self.url and (not separator or scheme not in ("file", "s3") or not rest.strip("/")):
            raise ValueError(f"url must be file:///some/folder or s3://bucket/prefix, not {self.url!r}")
        _check_rows(self.micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """Stages send whole batches straight to the next stage."""

    kind: ClassVar[str] = "direct"
    schedule: ClassVar[Schedule] = "1f1b"
    micro_batch_size: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages work on several micro-batches at once, so that all compute side by side."""

    kind: ClassVar[str] = "pipeline"

    micro_batch_size: int
    """Rows per micro-batch. The last one of a batch may be shorter; the gradient is the whole batch's."""
    schedule: Schedule = "1f1b"
    """The order of forwards and backwards on each stage."""

    def __post_init__(self) -> None:
        _check_rows(self.micro_batch_size)
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, not {self.schedule!r}")


CommunicationProtocol = DataStore | Direct | Pipeline

_BY_NAME: dict[str, type[DataStore] | type[Direct] | type[Pipeline]] = {
    option.__name__: option for option in (DataStore, Direct, Pipeline)
}


def to_json(protocol: CommunicationProtocol) -> dict[str, Any]:
    """Convert to JSON as published, with `protocol` as the tag; a field of our own that has its default is left out."""
    defaults = {field.name: field.default for field in fields(protocol)}
    told = {name: value for name, value in asdict(protocol).items() if value != defaults[name]}
    return {"protocol": type(protocol).__name__} | told


def from_json(data: Mapping[str, Any]) -> CommunicationProtocol:
    """The reverse of to_json, of data from outside: ConfigError for what is none."""
    name = data.get("protocol")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"protocol must be one of {', '.join(_BY_NAME)}, not {name!r}.")
    return from_dict(kind, {key: value for key, value in data.items() if key != "protocol"}, kind.__name__)


def _check_rows(rows: int | None) -> None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"micro_batch_size is a whole number of rows, at least 1, not {rows!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """One model over several workers: how it is cut, and how its stages talk."""

    protocol: CommunicationProtocol
    """How stages exchange activations and gradients."""
    count: int | None = None
    """Workers that hold one replica between them, some layers each; None: all workers, so one replica."""
    cuts: tuple[int, ...] = ()
    """The first layer of each stage after the first. Empty: by what layers cost and what workers can do and hold."""

    def __post_init__(self) -> None:
        if isinstance(self.protocol, DataStore) and not self.protocol.url:
            raise ValueError(
                "DataStore does not say where its store is. Give its url before the run starts: file:///some/folder, or"
                " s3://bucket/prefix (with potluck train: --set stages.protocol.url=...)"
            )
        check_at_least(1, count=self.count)
        if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 for cut in self.cuts):
            raise ValueError(f"cuts are layers from 1 on, in order, each once, not {list(self.cuts)}")

    @property
    def schedule(self) -> Schedule:
        return self.protocol.schedule

    @property
    def store(self) -> DataStore | None:
        """Where stages meet that have no connection to each other."""
        return self.protocol if isinstance(self.protocol, DataStore) else None

    @property
    def micro_batch_size(self) -> int | None:
        """The protocol's; None: whole batches."""
        return self.protocol.micro_batch_size
