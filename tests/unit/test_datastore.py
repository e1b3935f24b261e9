"""A channel over a folder or an object store: nothing unchecked is read, nothing needed is lost, nothing lingers."""

import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import PotluckError, StoreError, TheirProtocolError, WorkerLost
from potluck.stages.datastore import StoreChannel, key_of, label_of
from potluck.stages.pipeline import WHAT, Label
from potluck.store import bucket
from potluck.store.place import HEAD_BYTES, Damaged, Exists, Head, ObjectWriter, bucket_of, folder_of
from potluck.store.sessions import Claim
from potluck.store.store import KEY, MOST_KEY_BYTES, Patience, Store
from potluck.store.tensors import DTYPES
from tests.bare import Tell, Worker
from tests.quick import first_of
from tests.servers import BUCKET, KEYS, Rclone, moto, rclone

PATIENCE_S = 20.0


def store_at(url: str | Path, *, generation: int = 1, patience_s: float = PATIENCE_S, run: str = "run") -> Store:
    url = f"file://{url}" if isinstance(url, Path) else url
    return Store(url, run=run, generation=generation, patience_s=patience_s)


def channel_at(url: str | Path, stage: int, **options: Any) -> StoreChannel:
    return StoreChannel(store_at(url, **options), stage)


def tensor_of(label: Label) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * label.step + label.micro)
    return torch.randn(5, 7, generator=generator)


def wait_until(holds: Callable[[], bool]) -> None:
    patience = Patience(store_place(), threading.Event())
    while not holds():
        assert patience.waited_s < PATIENCE_S, "it did not come true"
        patience.pause()


def store_place() -> Any:
    from potluck.store.folder import Folder

    return Folder(Path("/"))


def files(folder: Path) -> list[str]:
    # Not rglob: it fails where a folder is deleted between the moment it is seen and the moment it is read.
    return sorted(str(Path(found, name).relative_to(folder)) for found, _, names in os.walk(folder) for name in names)


# Keys and urls

labels = st.builds(
    Label,
    step=st.integers(0, 10**12 - 1),
    what=st.sampled_from(WHAT),
    source=st.integers(0, 10**6),
    target=st.integers(0, 10**6),
    micro=st.integers(0, 10**6),
    part=st.integers(0, 10**6),
)


@given(labels, labels)
def test_a_labels_key_is_its_own_and_stays_below_its_prefix(label: Label, other: Label) -> None:
    key = key_of(label)
    assert KEY.fullmatch(key) and len(key) <= MOST_KEY_BYTES and label_of(key) == label
    assert (key_of(other) == key) == (other == label)
    assert ".." not in key and not key.startswith("/") and "//" not in key


@given(st.text(max_size=60) | st.from_regex(r"to-\d+/s\d{12}-[a-z]+-m\d+-p\d+-from-\d+", fullmatch=True))
def test_a_name_that_we_did_not_make_is_no_label(name: str) -> None:
    label = label_of(name)
    assert label is None or label_of(key_of(label)) == label


@given(st.text(max_size=40))
def test_whatever_a_url_says_it_is_one_folder_or_refused(text: str) -> None:
    try:
        folder = folder_of(f"file://{text}")
    except StoreError:
        return
    assert folder.is_absolute() and ".." not in folder.parts and "\0" not in str(folder)
    assert len(folder.parts) > 1


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file:///a/b", "/a/b"),
        ("file:///a//b///", "/a/b"),
        ("file:///a/with space", "/a/with space"),
        ("file:///a/with%20space", "/a/with space"),
        ("file:///a/50%25", "/a/50%"),
        ("file://localhost/a", "/a"),
        ("file:///%C3%A9", "/é"),
        ("file:///a/%23", "/a/#"),
    ],
)
def test_a_url_names_a_folder(url: str, folder: str) -> None:
    assert folder_of(url) == Path(folder)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///a/../b", "without . and .."),
        ("file:///a/%2e%2e/b", "without . and .."),
        ("file:///", "must name one folder"),
        ("file://host/a", "three slashes"),
        ("file:///a?b", "%3F"),
        ("file:///a/50%", "%25"),
        ("file:///a/%00", "cannot be printed"),
        ("file:///a/%ff", "no UTF-8"),
        ("s3://B/a", "a bucket's name"),
        ("s3://ok-bucket/a/../b", "in its prefix"),
        ("s3://ok-bucket/a/%2e%2e", "in its prefix"),
        ("s3://ok-bucket/a*b", "in its prefix"),
        ("http://a/b", "file:///some/folder or s3://"),
    ],
)
def test_a_url_that_is_none_is_refused_by_a_sentence(url: str, said: str) -> None:
    with pytest.raises(StoreError, match="^.*" + said.replace(".", r"\.").replace("?", r"\?")):
        store_at(url)


def test_a_bucket_and_its_prefix() -> None:
    assert bucket_of("s3://ok-bucket") == ("ok-bucket", "")
    assert bucket_of("s3://ok-bucket//a b/c%20d/") == ("ok-bucket", "a b/c d")


@pytest.mark.parametrize("run", ["", "../other", "a/b", "a b", "x" * 65, "-a"])
def test_a_runs_name_cannot_leave_the_folder(run: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="A run's name"):
        store_at(tmp_path, run=run)


# Places


class At(NamedTuple):
    """Where a store is. `folder`: where its objects lie on this disk, which moto's do not."""

    url: str
    env: dict[str, str]
    folder: Path | None = None


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rclone, Path]]:
    folder = tmp_path_factory.mktemp("s3")
    with rclone(folder) as server:
        yield server, folder / BUCKET


@pytest.fixture(scope="module")
def conditional() -> Iterator[dict[str, str]]:
    with moto() as env:
        yield env


def use(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["folder", "rclone", "moto"])
def at(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    """A url of its own for each test."""
    if request.param == "folder":
        return At(f"file://{tmp_path}", {}, tmp_path)
    own = f"some prefix/{abs(hash(request.node.name))}"
    if request.param == "rclone":
        server, folder = request.getfixturevalue("signed")
        found = At(f"s3://{BUCKET}/{own}", server.env, folder / own)
    else:
        found = At(f"s3://{BUCKET}/{own}", request.getfixturevalue("conditional"))
    use(monkeypatch, found.env)
    return found


def in_places(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("at", names, indirect=True)


# Objects


def object_of(payload: bytes) -> bytes:
    writer = ObjectWriter("run/g000001/key", 1, b"about", [memoryview(payload)])
    digest = writer.digest()
    digest.update(payload)
    return writer.head(digest.digest()) + payload


def opened(data: bytes) -> bytes:
    head = Head.read(data[:HEAD_BYTES], len(data))
    payload = data[HEAD_BYTES:]
    digest = head.digest()
    digest.update(memoryview(payload))
    head.check(digest)
    return payload


@given(st.binary(max_size=300), st.data())
@settings(max_examples=300)
def test_any_cut_of_an_object_is_found(payload: bytes, data: st.DataObject) -> None:
    whole = object_of(payload)
    assert opened(whole) == payload
    with pytest.raises(Damaged):
        opened(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(Damaged):
        opened(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=300), st.data())
@settings(max_examples=500)
def test_any_flipped_byte_of_an_object_is_found(payload: bytes, data: st.DataObject) -> None:
    changed = bytearray(object_of(payload))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        opened(bytes(changed))


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_bytes_of_anybody_else_are_no_object(data: bytes) -> None:
    with pytest.raises(Damaged):
        opened(data)


def put_one(folder: Path, payload: bytes = b"payload" * 100) -> tuple[Store, Path]:
    store = store_at(folder)
    store.put_bytes("box/key", payload)
    return store, folder / "run/g000001/box/key"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[:-1], "1,211 bytes instead of 1,212"),
        (lambda data: data[:-10], "1,202 bytes instead of 1,212"),
        (lambda data: data[:100], "only 100 bytes"),
        (lambda data: b"", "only 0 bytes"),
        (lambda data: data[:-1] + b"!", "checksum is wrong"),
        (lambda data: b"Dear diary, " * 100, "not written by Potluck"),
    ],
)
@in_places("folder", "rclone")
def test_an_object_that_was_altered_is_named(spoil: Callable[[bytes], bytes], said: str, at: At) -> None:
    store = store_at(at.url)
    store.put_bytes("box/key", b"payload" * 100)
    assert at.folder is not None
    path = at.folder / "run/g000001/box/key"
    path.write_bytes(spoil(path.read_bytes()))
    named = rf"The object run/g000001/box/key in {at.url[:7]}.*{said}.*Delete it"
    with pytest.raises(TheirProtocolError, match=named) as caught:
        store.get_bytes("box/key")
    assert "\n" not in str(caught.value)
    store.put_bytes("box/key", b"healed")
    assert store.get_bytes("box/key") == b"healed"


def test_an_object_in_anothers_place_is_found_out(tmp_path: Path) -> None:
    store, path = put_one(tmp_path)
    path.rename(path.with_name("other"))
    with pytest.raises(TheirProtocolError, match="it is 'run/g000001/box/key'"):
        store.get_bytes("box/other")


def test_what_is_wrong_at_first_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = put_one(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"!")
    read, seen = store._read, []

    def then_mend(*arguments: Any) -> bool:
        try:
            return read(*arguments)
        finally:
            seen.append(path.write_bytes(whole))

    monkeypatch.setattr(store, "_read", then_mend)
    assert store.get_bytes("box/key") == b"payload" * 100
    assert len(seen) == 2


# Generations


def test_what_an_older_generation_left_is_ignored_and_cleared(tmp_path: Path) -> None:
    old = channel_at(tmp_path, 0, generation=1)
    label = Label(0, "activation", 0, 1)
    old.send(label, torch.zeros(3))
    old.flush()
    new, reader = channel_at(tmp_path, 0, generation=2), channel_at(tmp_path, 1, generation=2)
    new.send(label, torch.ones(3))
    assert torch.equal(reader.receive(label), torch.ones(3))
    wait_until(lambda: not [name for name in files(tmp_path) if "g000001" in name])
    for channel in (old, new, reader):
        channel.close()


def test_an_object_of_an_older_generation_at_our_key_is_not_there(tmp_path: Path) -> None:
    store, path = put_one(tmp_path)
    (tmp_path / "run/g000002/box").mkdir(parents=True)
    path.rename(tmp_path / "run/g000002/box/key")
    newer = store_at(tmp_path, generation=2)
    assert newer.get_bytes("box/key") is None
    newer.put_bytes("box/key", b"new")
    assert newer.get_bytes("box/key") == b"new"
    del store


def test_a_worker_of_an_older_generation_is_told_so(tmp_path: Path) -> None:
    late = channel_at(tmp_path, 0, generation=1)
    newer = channel_at(tmp_path, 0, generation=2)
    with pytest.raises(StoreError, match="generation 2, and this worker still in 1"):
        late.receive(Label(0, "gradient", 1, 0))
    with pytest.raises(StoreError, match="Start it again"):
        store_at(tmp_path, generation=1)
    late.close()
    newer.close()


def test_runs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    store_at(tmp_path, run="a").put_bytes("box/key", b"a")
    other = store_at(tmp_path, run="b", generation=7)
    assert other.get_bytes("box/key") is None and other.keys("box") == []
    store_at(tmp_path, run="b", generation=8).clear_older()
    assert store_at(tmp_path, run="a").get_bytes("box/key") == b"a"


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    store, path = put_one(tmp_path)
    (path.parent / "README.txt").write_text("mine")
    assert store.keys("box") == ["box/key"]
    store_at(tmp_path, generation=2).clear_older()
    assert files(tmp_path) == ["run/g000001/box/README.txt"]


# The channel


def test_every_tensor_arrives_as_it_was(tmp_path: Path) -> None:
    tensors = [torch.randn(3, 5).to(dtype) for dtype in DTYPES]
    tensors += [torch.empty(0, 4), torch.tensor(3.0), torch.randn(4, 6).t(), torch.randn(8, 8)[::2, 1:5]]
    tensors += [torch.randn(2, 2, requires_grad=True), torch.randn(1 << 18)]
    sent = [Label(0, "activation", 0, 1, micro) for micro in range(len(tensors))]
    source, target = channel_at(tmp_path, 0), channel_at(tmp_path, 1)
    target.expect(sent)
    for label, tensor in zip(sent, tensors, strict=True):
        source.send(label, tensor)
    for label, tensor in zip(sent, tensors, strict=True):
        arrived = target.receive(label)
        assert arrived.dtype == tensor.dtype and torch.equal(arrived, tensor.detach()), label
    source.close()
    target.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_go_through_host_memory(tmp_path: Path) -> None:
    device = torch.device("cuda")
    source = StoreChannel(store_at(tmp_path), 0, device=device)
    target = StoreChannel(store_at(tmp_path), 1, device=device)
    sent = [Label(0, "activation", 0, 1, micro) for micro in range(12)]
    tensors = [torch.randn(256, 1024, device=device) for _ in sent]
    target.expect(sent)
    for label, tensor in zip(sent, tensors, strict=True):
        source.send(label, tensor * 2)
    for label, tensor in zip(sent, tensors, strict=True):
        arrived = target.receive(label)
        assert arrived.device.type == "cuda" and torch.equal(arrived, tensor * 2)
    source.close()
    target.close()


def test_labels_may_be_received_out_of_turn(tmp_path: Path) -> None:
    sent = [Label(0, "activation", 0, 2, micro) for micro in range(20)] + [Label(0, "tied", 1, 2)]
    first, second, target = (channel_at(tmp_path, stage) for stage in range(3))
    target.expect(sent)
    for label in sent:
        (first if label.source == 0 else second).send(label, tensor_of(label))
    for label in reversed(sent):
        assert torch.equal(target.receive(label), tensor_of(label))
    assert torch.equal(target.receive(sent[3]), tensor_of(sent[3])), "again, since nothing was consumed"
    for channel in (first, second, target):
        channel.close()


def test_no_more_is_fetched_ahead_than_twice_what_is_in_flight(tmp_path: Path) -> None:
    sent = [Label(0, "activation", 0, 1, micro) for micro in range(12)]
    source, target = channel_at(tmp_path, 0), channel_at(tmp_path, 1)
    for label in sent:
        source.send(label, tensor_of(label))
    source.flush()
    target.expect(sent)
    for left, label in zip(range(12, 0, -1), sent, strict=True):
        assert len(target._coming) == min(8, left)
        target.receive(label)
    source.close()
    target.close()


def test_a_wait_in_vain_names_what_and_whom(tmp_path: Path) -> None:
    channel = channel_at(tmp_path, 1, patience_s=0.2)
    with pytest.raises(WorkerLost, match=r"Waited 0.2 s in vain for activation 3 of step 7 from stage 0.*Stage 0 is"):
        channel.receive(Label(7, "activation", 0, 1, 3))
    channel.close()


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    label = Label(0, "activation", 0, 1)
    for about, said in ((b"", "shape"), (b"\xff", "number 255"), (b"\x00" + b"\xff" * 8, "no tensor has")):
        store_at(tmp_path).put(key_of(label), [memoryview(b"1234")], about)
        channel = channel_at(tmp_path, 1)
        with pytest.raises(TheirProtocolError, match=said):
            channel.receive(label)
        channel.close()
    store_at(tmp_path).put(key_of(label), [memoryview(b"1234")], b"\x00" + (2).to_bytes(8, "little"))
    channel = channel_at(tmp_path, 1)
    with pytest.raises(TheirProtocolError, match="4 bytes, and 8 in its header"):
        channel.receive(label)
    channel.close()


def test_a_put_that_failed_is_told_by_the_next_call_even_by_one_that_waits(tmp_path: Path) -> None:
    channel = channel_at(tmp_path, 0)
    (tmp_path / "run/g000001/to-1").write_text("in the way")
    channel.send(Label(0, "activation", 0, 1), torch.zeros(3))
    with pytest.raises(StoreError, match=r"cannot be used"):
        channel.receive(Label(0, "gradient", 1, 0))
    for call in (channel.flush, lambda: channel.consumed(0)):
        with pytest.raises(StoreError):
            call()
    channel.close()


def test_consumed_steps_are_deleted_and_later_ones_are_not(tmp_path: Path) -> None:
    source, target = channel_at(tmp_path, 0), channel_at(tmp_path, 1)
    for step in range(4):
        source.send(Label(step, "activation", 0, 1), torch.zeros(3))
    source.flush()
    target.consumed(1)
    inbox = tmp_path / "run/g000001/to-1"
    wait_until(lambda: [name[:13] for name in files(inbox)] == ["s000000000002", "s000000000003"])
    assert torch.equal(target.receive(Label(2, "activation", 0, 1)), torch.zeros(3))
    target.end()
    source.end()
    assert list(tmp_path.iterdir()) == []


def test_the_worker_before_finds_out_that_another_took_its_place(tmp_path: Path) -> None:
    first = channel_at(tmp_path, 1)
    second = channel_at(tmp_path, 1)
    with pytest.raises(StoreError, match="Another worker has become stage 1"):
        first.receive(Label(0, "activation", 0, 1))
    with pytest.raises(StoreError, match="Another worker has become stage 1"):
        first.consumed(5)
    second.consumed(0)
    first.close()
    second.end()


@in_places("folder", "moto")
def test_of_two_that_claim_a_place_at_once_one_is_refused(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(at.url)
    store.put_bytes("box/key", b"first", new=True)
    with pytest.raises(Exists):
        store.put_bytes("box/key", b"second", new=True)
    assert store.get_bytes("box/key") == b"first"
    Claim(store, "stage-1", "stage 1")
    monkeypatch.setattr(store, "get_bytes", lambda key: None)  # both looked before either had put
    with pytest.raises(StoreError, match="Two workers began as stage 1"):
        Claim(store, "stage-1", "stage 1")


def test_a_program_that_forgets_to_close_ends(tmp_path: Path) -> None:
    script = (
        "from potluck.store.store import Store\nfrom potluck.stages.datastore import StoreChannel, Label\n"
        f"channel = StoreChannel(Store('file://{tmp_path}', run='r', generation=0, patience_s=600), 0)\n"
        "channel.expect([Label(0, 'gradient', 1, 0)])\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0


# Killed


def step_forward(channel: StoreChannel, step: int) -> None:
    """What the first of two stages does in a step."""
    for micro in range(4):
        label = Label(step, "activation", 0, 1, micro)
        channel.send(label, tensor_of(label))
    channel.flush()


def read_steps(
    tell: Tell, url: str, first: int, steps: int, consume: bool, end: bool, last: tuple[int, int] | None = None
) -> None:
    """The second stage: receives, answers, and says what it received. After `last` it waits to be killed."""
    channel = channel_at(url, 1)
    for step in range(first, steps):
        expected = [Label(step, "activation", 0, 1, micro) for micro in range(4)]
        channel.expect(expected)
        for label in expected:
            assert torch.equal(channel.receive(label), tensor_of(label))
            channel.send(Label(step, "gradient", 1, 0, label.micro), tensor_of(label))
            tell((step, label.micro))
            if (step, label.micro) == last:
                threading.Event().wait()
        channel.flush()
        if consume:
            channel.consumed(step)
    channel.end() if end else channel.close()


@pytest.mark.parametrize(
    ("at", "after"),
    first_of([("folder", 1), ("rclone", 1), ("moto", 1), ("folder", 2), ("folder", 4)], 3),
    indirect=["at"],
)
def test_a_reader_killed_finds_its_inputs_again(after: int, at: At) -> None:
    source = channel_at(at.url, 0)
    step_forward(source, 0)
    with Worker(read_steps, at.url, 0, 2, False, False, env=at.env) as reader:
        assert [reader.hear() for _ in range(after)][-1] == (0, after - 1)
        reader.kill()
    with Worker(read_steps, at.url, 0, 2, True, True, env=at.env) as successor:
        step_forward(source, 1)
        gradients = [Label(step, "gradient", 1, 0, micro) for step in range(2) for micro in range(4)]
        assert [source.receive(label).shape for label in gradients] == [(5, 7)] * 8
        assert [successor.hear() for _ in range(8)] == [(step, micro) for step in range(2) for micro in range(4)]
        successor.finish()
    names = store_at(at.url)._place.names
    assert [name for name in names("run") if "to-1" in name or "stage-1" in name] == []
    source.end()
    assert names("run") == [] and (not at.url.startswith("file:") or files(at.folder) == [])


def test_a_reader_killed_after_it_consumed_goes_on_from_there(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    source = channel_at(url, 0)
    for step in range(3):
        step_forward(source, step)
    with Worker(read_steps, url, 0, 3, True, False, (1, 0)) as reader:
        while reader.hear() != (1, 0):
            pass
        reader.kill()
    with Worker(read_steps, url, 1, 3, True, True) as successor:
        assert [successor.hear() for _ in range(8)] == [(step, micro) for step in (1, 2) for micro in range(4)]
        successor.finish()
    source.end()
    assert files(tmp_path) == []


def test_what_killed_workers_were_writing_goes_when_the_run_ends(tmp_path: Path) -> None:
    """Also of marks and claims: a kill can come between the file that is written and its name."""
    source, target = (channel_at(tmp_path, stage) for stage in range(2))
    step_forward(source, 0)
    run = tmp_path / "run" / "g000001"
    for folder, name in (("marks", "stage-1"), ("claims", "stage-1"), ("claims", "stage-0"), ("to-1", "s0")):
        (run / folder).mkdir(exist_ok=True)
        (run / folder / f".{name}~0123abcd").write_bytes(b"half")
    target.end()
    assert ".stage-0~0123abcd" in {path.name for path in run.rglob("*")}, "another stage's is its own to clear"
    source.end()
    assert files(tmp_path) == []


def write_for_ever(tell: Tell, url: str) -> None:
    channel = channel_at(url, 0)
    tensor = torch.arange(1 << 20)
    for step in range(10**6):
        channel.send(Label(step, "activation", 0, 1), tensor)
        if step % 8 == 7:
            channel.flush()
            tell(step)


def test_a_writer_killed_while_it_writes_leaves_only_whole_objects(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    inbox, unfinished = tmp_path / "run/g000001/to-1", 0
    for attempt in range(3):
        target = channel_at(url, 1)
        with Worker(write_for_ever, url) as writer:
            writer.hear()
            # Killed in the middle of a write, as often as we can catch it there.
            wait_until(lambda: any(name.startswith(".s0") for name in files(inbox)))
            writer.kill()
        unfinished += sum(name.startswith(".s0") for name in files(inbox))
        whole = [label_of(f"to-1/{name}") for name in files(inbox) if not name.startswith(".")]
        assert len(whole) >= 8, attempt
        for label in whole:
            assert label is not None
            assert torch.equal(target.receive(label), torch.arange(1 << 20))
        target.consumed(10**6)  # the unfinished ones go with it
        wait_until(lambda: all(name.startswith(".spare-") for name in files(inbox)))
        target.close()
        (tmp_path / "run/g000001/marks/stage-1").unlink()
    assert unfinished, "no kill met a write, so this proved nothing"


def write_steps(tell: Tell, url: str, first: int, steps: int) -> None:
    channel = channel_at(url, 0)
    for step in range(first, steps):
        step_forward(channel, step)
        tell(step)
    channel.close()


def test_a_writer_started_again_does_not_send_what_is_consumed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    target = channel_at(url, 1)
    with Worker(write_steps, url, 0, 100) as writer:
        while writer.hear() != 2:
            pass
        writer.kill()
    for micro in range(4):
        target.receive(Label(1, "activation", 0, 1, micro))
    target.consumed(1)
    inbox = tmp_path / "run/g000001/to-1"
    wait_until(lambda: not [name for name in files(inbox) if name.startswith(("s000000000000", "s000000000001"))])
    with Worker(write_steps, url, 0, 3) as successor:
        assert [successor.hear() for _ in range(3)] == [0, 1, 2]
        successor.finish()
    written = {name[:13] for name in files(inbox) if not name.startswith(".")}
    assert "s000000000002" in written and not written & {"s000000000000", "s000000000001"}
    for micro in range(4):
        label = Label(2, "activation", 0, 1, micro)
        assert torch.equal(target.receive(label), tensor_of(label))
    target.end()
    channel_at(url, 0).end()
    assert files(tmp_path) == []


# Folders in trouble


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder):
        source, target = channel_at(folder, 0), channel_at(folder, 1)
        small, large = Label(0, "activation", 0, 1), Label(1, "activation", 0, 1)
        source.send(small, torch.ones(1000))
        source.flush()
        source.send(large, torch.ones(1 << 20))
        with pytest.raises(StoreError, match=r"is full .*Make room there.*nothing is lost"):
            source.flush()
        assert torch.equal(target.receive(small), torch.ones(1000))
        assert not [name for name in files(folder) if "~" in name], "what was half written is gone"
        source.close()
        successor = channel_at(folder, 0)
        successor.send(large, torch.ones(1 << 16))
        assert torch.equal(target.receive(large), torch.ones(1 << 16))
        successor.close()
        target.close()


def test_a_read_only_folder_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder):
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(StoreError, match=r"cannot be read and written by this worker .Read-only"):
            channel_at(folder, 0)


def write_past_a_limit(tell: Tell, url: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    channel = channel_at(url, 0)
    channel.send(Label(0, "activation", 0, 1), torch.ones(1 << 18))
    try:
        channel.flush()
    except StoreError as error:
        tell(str(error))
    channel.close()


def test_a_limit_on_files_is_a_full_disk_too(tmp_path: Path) -> None:
    with Worker(write_past_a_limit, f"file://{tmp_path}") as writer:
        assert "is full (File too large)" in writer.hear()
        writer.finish()
    assert files(tmp_path) == ["run/g000001/claims/stage-0"]


def put_until_it_is_back(store: Store, come_back: Callable[[], Any]) -> None:
    """It comes back once a write has failed."""
    tried, write = threading.Event(), store._place.write

    def watched(*arguments: Any, **options: Any) -> None:
        try:
            write(*arguments, **options)
        finally:
            tried.set()

    store._place.write = watched  # type: ignore[method-assign]
    putting = threading.Thread(target=store.put_bytes, args=("box/other", b"after"))
    putting.start()
    assert tried.wait(PATIENCE_S)
    come_back()
    putting.join()
    assert [store.get_bytes(key) for key in ("box/key", "box/other")] == [b"before", b"after"]
    assert sorted(store.keys("box")) == ["box/key", "box/other"]


def test_a_folder_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "share"
    store = store_at(folder)
    store.put_bytes("box/key", b"before")
    folder.rename(tmp_path / "away")
    put_until_it_is_back(store, lambda: (tmp_path / "away").rename(folder))


def test_a_folder_that_stays_away_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "share"
    store = store_at(folder, patience_s=0.2)
    folder.rmdir()
    with pytest.raises(StoreError, match=r"could not be reached for 0.2 s, while writing box/key: .*is gone"):
        store.put_bytes("box/key", b"")
    assert not folder.exists(), "a share that is not mounted must not become a folder of our own"
    with pytest.raises(StoreError, match=r"does not exist\. Make or mount it"):
        store_at(folder / "deeper")
    folder.write_text("")
    with pytest.raises(StoreError, match="is a file"):
        store_at(folder)


# Object stores


@in_places("rclone", "moto")
def test_a_large_object_travels_in_pieces(at: At) -> None:
    store = store_at(at.url)
    store._place._whole_bytes = 5 << 20  # type: ignore[attr-defined]
    data = torch.randint(0, 255, (12 << 20,), dtype=torch.uint8)
    arrived = torch.empty_like(data)
    store.put("box/large", [data.numpy().data])
    assert store.get("box/large", lambda about, size: arrived.numpy().data)
    assert torch.equal(arrived, data)
    store.delete(["box/large"])


@pytest.mark.parametrize(
    ("env", "url", "said"),
    first_of(
        [
            ({"AWS_SECRET_ACCESS_KEY": "wrong"}, f"s3://{BUCKET}", r"does not let us in \(SignatureDoesNotMatch\)"),
            ({"AWS_ACCESS_KEY_ID": "nobody"}, f"s3://{BUCKET}", r"does not let us in \(InvalidAccessKeyId\)"),
            ({}, "s3://no-such-bucket/prefix", "There is no bucket 'no-such-bucket'"),
            ({"AWS_ENDPOINT_URL": "http://192.0.2.1"}, f"s3://{BUCKET}", "not encrypted.*AWS_ALLOW_HTTP=true"),
            ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, f"s3://{BUCKET}", "could not be reached for 0.3 s"),
        ]
    ),
)
def test_a_bucket_that_does_not_let_us_in_is_a_sentence(
    env: dict[str, str], url: str, said: str, signed: tuple[Rclone, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, signed[0].env | env)
    with pytest.raises(StoreError, match=said) as caught:
        store_at(url, patience_s=0.3)
    assert "\n" not in str(caught.value) and "Debug" not in str(caught.value)


def test_no_credentials_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    with pytest.raises(StoreError, match="Set AWS_ACCESS_KEY_ID"):
        store_at(f"s3://{BUCKET}", patience_s=0.3)


def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as later:
        with rclone(tmp_path) as first:
            use(monkeypatch, first.env)
            store = store_at(f"s3://{BUCKET}/a")
            store.put_bytes("box/key", b"before")
        put_until_it_is_back(store, lambda: later.callback(Rclone(tmp_path, first.port).stop))


def test_requests_are_signed_but_for_tls_and_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond loopback without TLS, by the user's own word, the payload is signed too."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(bucket, "S3Store", lambda *_, **options: made.append(options))
    for endpoint in ("http://192.0.2.1", "http://[::1]:9000", "http://localhost", "https://192.0.2.1", ""):
        use(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"})
        bucket.Bucket("ok-bucket", "", patience_s=1)
    assert [options["unsigned_payload"] for options in made] == [False, True, True, True, True]


def test_errors_of_the_store_end_a_command_with_a_sentence() -> None:
    assert issubclass(StoreError, PotluckError) and StoreError.exit_code == 2


# What is used again


def test_files_of_consumed_objects_are_written_over_and_gone_in_the_end(tmp_path: Path) -> None:
    source, target = channel_at(tmp_path, 0), channel_at(tmp_path, 1)
    inbox = tmp_path / "run/g000001/to-1"
    files_used: set[int] = set()
    for step in range(5):
        label = Label(step, "activation", 0, 1)
        source.send(label, torch.full((1 << 19,), float(step)))
        source.flush()
        files_used |= {(inbox / name).stat().st_ino for name in files(inbox)}
        assert torch.equal(target.receive(label), torch.full((1 << 19,), float(step)))
        target.consumed(step)
        wait_until(lambda: [name[:7] for name in files(inbox)] == [".spare-"])
    assert len(files_used) == 1, "one file served all steps"
    source.send(Label(9, "activation", 0, 1), torch.zeros(1 << 20))
    source.flush()
    assert len(files(inbox)) == 2, "one of another size is left alone"
    source.end()
    target.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("limit_bytes", "kept"), [(1 << 28, 32), (10 << 20, 9)])
def test_spares_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, kept: int) -> None:
    monkeypatch.setattr("potluck.store.folder.SPARES_BYTES", limit_bytes)
    store = store_at(tmp_path)
    payload = memoryview(bytes(1 << 20))
    for number in range(40):
        store.put(f"box/k{number}", [payload])
    store.delete((f"box/k{number}" for number in range(40)), recycle=True)
    assert store.keys("box") == [] and len(files(tmp_path)) == kept
    store.delete(["box/k1", "box/never-was"], recycle=True)
    store_at(tmp_path, generation=2).clear_older()
    assert list(tmp_path.iterdir()) == []


def plant(how: str, spare: Path, victim: Path) -> None:
    """In the place of a spare file, by somebody who may write to the folder."""
    spare.unlink()
    match how:
        case "a link":
            spare.symlink_to(victim)
        case "a link to nothing":
            spare.symlink_to(victim.with_name("new"))
        case "another name of it":
            os.link(victim, spare)
        case "a pipe":
            os.mkfifo(spare)
        case "a file of another user":
            spare.write_bytes(victim.read_bytes())
            os.chown(spare, 12345, 12345)
        case "a shorter file":
            spare.write_bytes(b"short")


@pytest.mark.parametrize(
    "how",
    [
        "a link",
        "a link to nothing",
        "another name of it",
        "a pipe",
        pytest.param(
            "a file of another user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
        ),
        "a shorter file",
    ],
)
def test_what_was_planted_among_the_spares_is_not_written_through(how: str, tmp_path: Path) -> None:
    folder, victim = tmp_path / "store", tmp_path / "victim"
    store = store_at(folder)
    payload = memoryview(bytes(1 << 20))
    store.put("box/k0", [payload])
    store.delete(["box/k0"], recycle=True)
    (spare,) = folder.rglob(".spare-*")
    precious = b"precious " * 200_000
    victim.write_bytes(precious[: spare.stat().st_size])
    plant(how, spare, victim)
    store.put("box/k1", [payload])
    assert victim.read_bytes() == precious[: victim.stat().st_size] and not (tmp_path / "new").exists()
    (written,) = folder.rglob("k1")
    found = written.lstat()
    assert stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    assert store.get("box/k1", lambda about, size: memoryview(bytearray(size)))


@pytest.mark.parametrize("how", ["a link", "a pipe", "a folder"])
def test_what_was_planted_among_the_objects_is_neither_read_nor_kept(how: str, tmp_path: Path) -> None:
    folder, victim = tmp_path / "store", tmp_path / "victim"
    victim.write_bytes(bytes(2 << 20))
    store = store_at(folder)
    store.put("box/k0", [memoryview(bytes(1 << 20))])
    (written,) = folder.rglob("k0")
    if how == "a folder":
        written.unlink()
        written.mkdir()
    else:
        plant(how, written, victim)
    with pytest.raises(StoreError, match="is no plain file: no worker has put it there"):
        store.get("box/k0", lambda about, size: memoryview(bytearray(size)))
    if how == "a link":
        store.delete(["box/k0"], recycle=True)
        assert not list(folder.rglob(".spare-*")) and victim.stat().st_size == 2 << 20


def test_files_in_a_store_are_not_for_everybody_to_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = store_at(tmp_path / "store")
        store.put("box/k0", [memoryview(b"x")])
    finally:
        os.umask(before)
    (written,) = (tmp_path / "store").rglob("k0")
    assert written.stat().st_mode & 0o002 == 0 and (tmp_path / "store").stat().st_mode & 0o007 == 0


def test_of_objects_that_come_one_after_another_only_the_next_is_looked_for(tmp_path: Path) -> None:
    source, target = channel_at(tmp_path, 0), channel_at(tmp_path, 1)
    looked: list[str] = []
    get = target._store.get
    target._store.get = lambda key, room: (looked.append(key), get(key, room))[1]  # type: ignore[method-assign]
    coming = [Label(0, "activation", 0, 1, micro) for micro in range(4)]
    target.expect(coming)
    wait_until(lambda: len(looked) > 3)
    for label in coming:
        assert {key for key in looked if key.startswith("to-")} == {key_of(label)}
        source.send(label, tensor_of(label))
        assert torch.equal(target.receive(label), tensor_of(label))
        following = coming[label.micro + 1 : label.micro + 2]
        looked.clear()
        wait_until(lambda following=following: not following or len(looked) > 3)
    source.close()
    target.close()
