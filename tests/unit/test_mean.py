"""The mean of a step: threads pour chunks in any order, some are lost midway, and the bits are those of the tree."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from potluck.coded_numbers import CODINGS, LOG8, Coding
from potluck.errors import TheirProtocolError
from potluck.fleet import mean as mean_module
from potluck.fleet.connection import PayloadLayout
from potluck.fleet.description import (
    BAD_BUFFERS,
    BUFFERS,
    COUNTS,
    DIVISORS,
    MOMENTS,
    OTHER_MOMENTS,
    Description,
    Part,
)
from potluck.fleet.mean import PayloadMean, Slot
from potluck.fleet.tree import Node, children, cover, decide_quotas, share_nodes
from potluck.wire.codec import Bulk, encode, open_bulk
from potluck.wire.messages import CodedPart

pytestmark = pytest.mark.timeout(20)

Floats = npt.NDArray[np.float32]

PARTS = (5, 11, 1, 8)
CHUNK = 3
CHUNKS = [2, 4, 1, 3]


class Step:
    """One step's slices, what comes of them, and what was called."""

    def __init__(self, slices: int, *, parts: Sequence[int] = PARTS, chunk: int = CHUNK, seed: int = 0) -> None:
        self.slices = slices
        self.parts = parts
        draw = np.random.default_rng((slices, seed))
        sizes = 10.0 ** draw.integers(-5, 5, (slices, 1))
        self.values = (draw.standard_normal((slices, sum(parts))) * sizes).astype(np.float32)
        self.mean = PayloadMean(parts, chunk=chunk)
        self.formed: list[int] = []
        self.done = threading.Event()
        self.bad: list[tuple[int, int, Node, str]] = []
        self.mean.on_part = lambda step, part: self.formed.append(part)
        self.mean.on_done = lambda step: self.done.set()
        self.mean.on_bad = lambda *what: self.bad.append(what)

    def begin(self, nodes: int, *, several: bool, scale: float = 0.125, step: int = 1) -> "Step":
        self.done.clear()
        self.formed.clear()
        self.mean.begin(step, self.slices, nodes=nodes, several=several)
        self.mean.set_scale(step, scale)
        return self

    def sum_of(self, node: Node) -> Floats:
        if node[1] - node[0] == 1:
            return self.values[node[0]]
        left, right = children(node)
        return self.sum_of(left) + self.sum_of(right)

    def part_of(self, total: Floats, part: int) -> Floats:
        edges = np.cumsum([0, *self.parts])
        return total[edges[part] : edges[part + 1]]

    def pour(
        self,
        nodes: Sequence[Node],
        *,
        peer: int = 1,
        stop_after: int | None = None,
        pause: Callable[[], None] = lambda: None,
        weight: float = 1.0,
    ) -> int:
        """As a worker sends: for each part in turn, each node. How many chunks were poured."""
        sums = {node: self.sum_of(node) for node in nodes}
        poured = 0
        for part in range(len(self.parts)):
            for node in nodes:
                values = self.part_of(sums[node], part)
                slot = self.mean.open(peer, 1, part, node, len(values), weight)
                try:
                    while not slot.is_full:
                        if poured == stop_after:
                            slot.revoked = True
                            return poured
                        pause()
                        count = slot.count
                        slot.space()[:] = values[:count].tobytes()
                        values = values[count:]
                        with np.errstate(over="ignore", invalid="ignore"):
                            slot.filled()
                        poured += 1
                finally:
                    slot.close()
        return poured

    def assert_right(self, scale: float = 0.125) -> None:
        assert self.done.is_set(), f"formed {self.formed} of {len(self.parts)}"
        expected = self.sum_of((0, self.slices)) * np.float32(scale)
        assert self.mean.flat.tobytes() == expected.tobytes()
        assert sorted(self.formed) == list(range(len(self.parts)))


def together(*calls: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a thread waits for ever"
    assert not errors, errors


@pytest.mark.parametrize("slices", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_concurrent_payloads_give_the_bits_of_the_tree(slices: int, workers: int) -> None:
    for seed in range(3):
        quotas = decide_quotas(slices, [random.Random(seed + w).uniform(1, 5) for w in range(workers)], None)
        pour_together(Step(slices, seed=seed), share_nodes(slices, quotas), random.Random(seed))


def pour_together(step: Step, shared: list[list[Node]], draw: random.Random) -> None:
    """Each worker in a thread of its own, with breaths of any length between chunks."""
    step.begin(sum(map(len, shared)), several=any(len(nodes) > 1 for nodes in shared))
    breath = threading.Event()

    def pause() -> None:
        breath.wait(draw.random() * 4e-4)

    together(*(partial(step.pour, nodes, pause=pause) for nodes in shared))
    step.assert_right()
    assert not step.bad


def test_one_slice_alone_is_its_own_mean() -> None:
    step = Step(1).begin(1, several=False)
    step.pour([(0, 1)])
    step.assert_right()


def test_parts_are_told_of_as_they_are_formed() -> None:
    step = Step(2).begin(2, several=False)
    told: list[tuple[int, Floats]] = []
    step.mean.on_part = lambda number, part: told.append((part, step.mean.results[part].copy()))
    together(lambda: step.pour([(0, 1)]), lambda: step.pour([(1, 2)]))
    assert sorted(part for part, _ in told) == [0, 1, 2, 3]
    for part, result in told:
        assert result.tobytes() == (step.part_of(step.sum_of((0, 2)), part) * np.float32(0.125)).tobytes()


# Workers that are lost midway


@pytest.mark.parametrize("stop_after", range(sum(CHUNKS) + 1))
def test_a_lost_contributor_is_replaced_by_itself(stop_after: int) -> None:
    step = Step(4).begin(2, several=False)
    step.mean.widen(1)
    step.pour([(0, 2)], stop_after=stop_after)
    step.pour([(2, 4)], peer=2)
    step.pour([(0, 2)], peer=2)
    step.assert_right()


def test_a_lost_contributor_is_replaced_by_its_children() -> None:
    """The first chunks of a part may be there of the node itself; the rest comes from its children."""
    for stop_after in range(sum(CHUNKS) + 1):
        step = Step(8).begin(2, several=False)
        step.mean.widen(1)
        step.pour([(0, 4)], stop_after=stop_after)
        together(
            partial(step.pour, [(4, 8)], peer=2),
            partial(step.pour, [(0, 2)], peer=3),
            partial(step.pour, [(2, 3), (3, 4)], peer=4),
        )
        step.assert_right()


def test_a_replacement_may_be_lost_as_well() -> None:
    for first, second in itertools.product(range(0, 9, 2), range(sum(CHUNKS))):
        step = Step(8).begin(2, several=False)
        step.mean.widen(1)
        step.pour([(0, 8)], stop_after=first)
        step.pour([(0, 4)], peer=2, stop_after=second)
        step.pour([(4, 8)], peer=3)
        for slices in cover(8, 0, 2), cover(8, 2, 4):
            step.pour(slices, peer=4)
        step.assert_right()


def test_what_a_lost_worker_still_sends_goes_nowhere() -> None:
    step = Step(2).begin(2, several=False)
    step.mean.widen(1)
    slot = step.mean.open(1, 1, 0, (0, 1), PARTS[0])
    slot.revoked = True
    slot.space()[:] = np.full(CHUNK, 1e9, np.float32).tobytes()
    slot.filled()
    slot.close()
    together(lambda: step.pour([(0, 1)], peer=2), lambda: step.pour([(1, 2)], peer=3))
    step.assert_right()


def test_chunks_that_come_twice_count_once() -> None:
    step = Step(2).begin(2, several=False)
    step.mean.widen(1)
    right = step.values.copy()
    step.pour([(0, 1)], peer=1)
    step.values = right + 1  # were they added, it would show
    step.pour([(0, 1)], peer=2)
    step.values = right
    step.pour([(1, 2)], peer=3)
    step.assert_right()


# Steps that are over


def test_a_payload_of_another_step_goes_nowhere() -> None:
    step = Step(2).begin(2, several=False)
    for number in (-1, 0, 2):
        slot = step.mean.open(1, number, 0, (0, 1), PARTS[0])
        while not slot.is_full:
            slot.space()[:] = np.full(slot.count, np.nan, np.float32).tobytes()
            slot.filled()
        slot.close()
    together(lambda: step.pour([(0, 1)]), lambda: step.pour([(1, 2)]))
    step.assert_right()
    assert not step.bad


def test_an_abandoned_step_lets_its_senders_go_and_leaves_nothing_behind() -> None:
    step = Step(4).begin(4, several=False)
    started = threading.Event()
    waiting = threading.Thread(target=lambda: step.pour([(0, 1)], pause=started.set), daemon=True)
    waiting.start()
    assert started.wait(30)
    step.mean.abort()
    waiting.join(30)
    assert not waiting.is_alive()
    step.begin(2, several=False)
    together(lambda: step.pour([(0, 2)]), lambda: step.pour([(2, 4)]))
    step.assert_right()


def test_a_thread_that_adds_while_its_step_is_abandoned_gives_no_buffer_back_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two payloads of a later step would be written into one buffer."""
    step = Step(4, parts=(CHUNK,)).begin(4, several=False)
    step.pour([(0, 1)])

    def abandon(node: Node) -> tuple[Node, Node]:
        monkeypatch.undo()
        step.mean.abort()
        return children(node)

    monkeypatch.setattr(mean_module, "children", abandon)
    step.pour([(1, 2)])
    free = [buffer.ctypes.data for buffer in step.mean._free]
    assert len(free) == len(set(free))


def test_a_mean_is_not_overwritten_before_all_have_been_sent_it() -> None:
    step = Step(1, parts=(CHUNK,)).begin(1, several=False)
    step.pour([(0, 1)])
    first = step.mean.results[0].copy()
    for receiver in (1, 2):
        step.mean.hold(0, receiver)
    step.begin(1, several=False, step=1, scale=2.0)
    sender = threading.Thread(target=lambda: step.pour([(0, 1)]), daemon=True)
    sender.start()
    step.mean.release(0, 1)
    sender.join(0.2)
    assert sender.is_alive() and step.mean.results[0].tobytes() == first.tobytes()
    assert step.mean.waits_for == {2}
    step.mean.release(0, 2)
    sender.join(30)
    assert not sender.is_alive() and not step.mean.waits_for
    step.assert_right(scale=2.0)


# Bad payloads


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("position", [0, 4, 9, 24])
def test_a_chunk_that_is_not_finite_is_told_and_reaches_no_mean(value: float, position: int) -> None:
    step = Step(2).begin(2, several=False)
    step.mean.widen(1)
    right = step.values[0].copy()
    step.values[0, position] = value
    step.pour([(0, 1)], peer=7)
    step.values[0] = right
    assert {(peer, number, node) for peer, number, node, _ in step.bad} == {(7, 1, (0, 1))}
    why = "is wildly large" if np.isfinite(value) else "is not finite"
    assert step.bad[0][3] == why
    together(lambda: step.pour([(0, 1)], peer=2), lambda: step.pour([(1, 2)], peer=3))
    step.assert_right()


def test_a_gradient_far_larger_than_any_before_is_told() -> None:
    step = Step(1)
    for _ in range(2):
        step.begin(1, several=False)
        step.pour([(0, 1)])
        step.assert_right()
    step.begin(1, several=False)
    right = step.values.copy()
    step.values[0, 6] = 1e8 * np.abs(right).max()
    step.pour([(0, 1)], peer=5)
    assert [what[3] for what in step.bad] == ["is wildly large"]
    assert not step.done.is_set()
    step.values = right
    step.pour([(0, 1)], peer=6)
    step.assert_right()


def test_buffers_may_change_by_any_amount_but_stay_finite() -> None:
    """A gradient's size says nothing of theirs, nor theirs of a gradient's."""
    step = Step(1)
    step.mean.buffers = 3
    for size in (1e-9, 1e30, 1.0):
        step.values[0, -8:] = size
        step.begin(1, several=False)
        step.pour([(0, 1)])
        step.assert_right()
    step.values[0, -1] = np.nan
    step.begin(1, several=False)
    step.pour([(0, 1)], peer=5)
    assert [what[3] for what in step.bad] == [BAD_BUFFERS]


def test_the_first_step_has_nothing_to_be_compared_with() -> None:
    step = Step(1)
    step.values *= np.float32(1e12)
    step.begin(1, several=False)
    step.pour([(0, 1)])
    step.assert_right()
    assert not step.bad


def test_a_mean_waits_for_its_scale() -> None:
    """A sum that is multiplied by nothing known would be applied by everybody."""
    step = Step(1)
    step.mean.begin(1, 1, nodes=1, several=False)
    pouring = threading.Thread(target=step.pour, args=([(0, 1)],), daemon=True)
    pouring.start()
    pouring.join(0.2)
    assert pouring.is_alive() and not step.done.is_set() and not step.formed
    step.mean.set_scale(1, 0.125)
    pouring.join(10)
    assert step.done.is_set() and np.array_equal(step.mean.flat, step.values[0] * np.float32(0.125))


# Weights, sizes and memory


def test_a_plain_peers_mean_is_weighed() -> None:
    step = Step(2).begin(2, several=False, scale=0.5)
    sums = step.values.copy()
    step.values[0] /= np.float32(4)
    together(lambda: step.pour([(0, 1)], weight=4.0), lambda: step.pour([(1, 2)]))
    step.values = sums
    step.assert_right(scale=0.5)


def test_a_payload_of_another_size_is_refused() -> None:
    step = Step(2).begin(2, several=False)
    with pytest.raises(TheirProtocolError, match="The payload has 6 gradients, and this part has 5"):
        step.mean.open(1, 1, 0, (0, 1), 6)


@pytest.mark.parametrize("senders", [2, 4, 8, 16])
def test_however_many_send_what_waits_stays_within_the_window(senders: int) -> None:
    """All but one send as fast as they can, and the last one not at all until they have to wait for it."""
    step = Step(senders, parts=(64, 64), chunk=1).begin(senders, several=False)
    window = step.mean._now.window
    assert window == 128 // (senders // 2)
    most = 0
    stuck = threading.Semaphore(0)
    real = step.mean._wait_for_turn

    def waits(slot: Slot) -> None:
        nonlocal most
        most = max(most, len(step.mean._now.waiting))
        if not slot.has_turn:
            stuck.release()
        real(slot)

    step.mean._wait_for_turn = waits  # type: ignore[method-assign]

    def last() -> None:
        for _ in range(senders - 1 if window < 128 else 0):
            assert stuck.acquire(timeout=30)
        step.pour([(senders - 1, senders)])

    together(*(partial(step.pour, [(number, number + 1)]) for number in range(senders - 1)), last)
    step.assert_right()
    assert most <= 128  # of each chunk no two siblings wait, so that all together are one gradient at most
    assert len(step.mean._free) <= 64


def test_several_nodes_of_one_worker_wait_for_each_other_within_their_part() -> None:
    step = Step(8)
    shared = share_nodes(8, [3, 3, 2])
    assert max(map(len, shared)) > 1
    step.begin(sum(map(len, shared)), several=True)
    together(*(partial(step.pour, nodes) for nodes in shared))
    step.assert_right()


def test_after_a_loss_a_worker_may_send_all_of_one_node_before_another() -> None:
    """It had sent its own before it was given the lost one's."""
    step = Step(8).begin(8, several=False)
    step.mean.widen(1)
    for node in [(7, 8), (6, 7), (0, 4), (4, 5), (5, 6)]:
        step.pour([node])
    step.assert_right()


@pytest.mark.parametrize("coding", [*CODINGS.values(), LOG8], ids=lambda coding: coding.wire)
@pytest.mark.parametrize("quotas", [[5], [3, 2], [1, 1, 1, 1, 1]], ids=len)
def test_coded_payloads_and_floats_give_the_bits_of_a_tree_that_is_rounded_everywhere(
    coding: Coding, quotas: list[int]
) -> None:
    sizes, draw = (700, 64, 7), np.random.default_rng(3)
    mean = PayloadMean(sizes, chunk=256, buffers=2, codings=[coding, CODINGS["int4"], None])
    done = threading.Event()
    mean.on_done = lambda step: done.set()
    values = [[draw.standard_normal(size).astype(np.float32) for size in sizes] for _ in range(5)]

    if coding is LOG8:
        for each in values:
            np.square(each[0], out=each[0])

    def arrives(part: int, numbers: Floats) -> Floats:
        own = mean._codings[part]
        return own.round(numbers.copy()) if own is not None else numbers

    def sum_of(part: int, node: Node) -> Floats:
        if node[1] - node[0] == 1:
            return arrives(part, values[node[0]][part])
        left, right = children(node)
        return arrives(part, sum_of(part, left) + sum_of(part, right))

    def pour(worker: int, nodes: list[Node]) -> None:
        for part, node in itertools.product(range(len(sizes)), nodes):
            is_coded = worker % 2 == 0 and part != 2
            numbers = sum_of(part, node)
            data = numbers.tobytes()
            if is_coded and (own := mean._codings[part]) is not None:
                data = own.encode(numbers, np.empty(own.coded_bytes(len(numbers)), np.uint8)).tobytes()
            slot = mean.open(worker, 1, part, node, len(numbers), coded=is_coded)
            while not slot.is_full:
                space = slot.space()
                space[:], data = data[: len(space)], data[len(space) :]
                slot.filled()
            assert not data
            slot.close()

    shared = share_nodes(5, quotas)
    mean.begin(1, 5, nodes=sum(map(len, shared)), several=any(len(nodes) > 1 for nodes in shared))
    mean.set_scale(1, 0.3)
    together(*(partial(pour, worker, nodes) for worker, nodes in enumerate(shared)))
    assert done.wait(30)
    for part, size in enumerate(sizes):
        expected = arrives(part, sum_of(part, (0, 5)) * np.float32(0.3))
        assert mean.results[part].tobytes() == expected.tobytes()
        if (own := mean._codings[part]) is not None:
            assert own.decode(mean.coded[part], np.empty(size, np.float32)).tobytes() == expected.tobytes()


def coded_part(part: int, number: int, count: int) -> Bulk:
    message = CodedPart(1, part, number, np.zeros(count, np.uint8))
    payload = memoryview(encode(message)[4:])
    bulk = open_bulk(payload, len(payload), "bincode")
    assert bulk is not None and bulk.nbytes == count
    return bulk


def test_what_a_coded_payload_says_of_itself_is_checked_before_it_is_read() -> None:
    parts = (Part(1, None, (60, 40)), Part(0, None, (64,)), Part(None, BUFFERS, (7,)))
    told: dict[str, Any] = {"model": "m", "rows": 8, "batch": 4, "slices": 4, "seed": 0, "unit": 1.0, "policy": "sync"}
    described = Description(parts=parts, samples_per_row=1.0, told={}, wire="int4", **told)
    layout = PayloadLayout.of(described)
    assert layout.check_coded(coded_part(0, 3, 68)) == (0, CODINGS["int4"])
    assert layout.check_coded(coded_part(1, 3, 34)) == (1, CODINGS["int4"])
    for part, number, count in [(0, 2, 68), (0, 99, 68), (0, 3, 67), (0, 3, 400), (2, 3, 34), (3, 3, 34)]:
        with pytest.raises(TheirProtocolError):
            layout.check_coded(coded_part(part, number, count))
    kept = (Part(MOMENTS, None, (64,)), Part(DIVISORS + 1, None, (300,)), Part(OTHER_MOMENTS + 2, None, (64,)))
    with_moments = PayloadLayout.of(replace(described, parts=(*parts[:2], *kept, Part(None, COUNTS, (2,)))))
    assert with_moments.codings[2:] == [CODINGS["int4"], LOG8, CODINGS["bf16"], None]
    assert with_moments.check_coded(coded_part(3, 4, 516)) == (3, LOG8)
    for part, number, count in [(2, 4, 34), (3, 3, 516), (3, 4, 515), (3, 4, 1 << 20), (4, 4, 258), (5, 4, 258)]:
        with pytest.raises(TheirProtocolError):
            with_moments.check_coded(coded_part(part, number, count))
    plain = replace(described, wire="fp32")
    with pytest.raises(TheirProtocolError, match="has no part 0 that is coded"):
        PayloadLayout.of(plain).check_coded(coded_part(0, 3, 68))
    assert '"wire"' not in plain.to_json() and Description.from_json(plain.to_json()) == plain
    assert Description.from_json(described.to_json()) == described
    with pytest.raises(TheirProtocolError, match="wire is one of"):
        Description.from_json(described.to_json().replace("int4", "int5"))


def test_parts_of_which_nothing_is_sent_are_not_waited_for() -> None:
    step = Step(2)
    step.mean.begin(1, 2, nodes=1, several=False, without=frozenset({1, 3}))
    step.mean.set_scale(1, 0.5)
    total = step.sum_of((0, 2))
    for part in (0, 2):
        values = step.part_of(total, part)
        slot = step.mean.open(1, 1, part, (0, 2), len(values))
        assert slot.has_turn
        slot.take(values)
        slot.close()
    assert step.done.is_set() and step.formed == [0, 2]
    np.testing.assert_array_equal(step.mean.results[2], step.part_of(total, 2) * np.float32(0.5))


def test_what_is_wild_is_told_by_steps_and_by_windows_apart() -> None:
    """Changes are far smaller than gradients."""
    mean = PayloadMean([4])
    found: list[str] = []
    mean.on_bad = lambda peer, step, node, why: found.append(why)
    for step, (size, is_window) in enumerate([(1e-8, True), (1.0, False), (1e-8, True), (1.0, True)], start=1):
        mean.begin(step, 1, nodes=1, several=False, is_window=is_window)
        mean.set_scale(step, 1.0)
        slot = mean.open(1, step, 0, (0, 1), 4)
        slot.take(np.full(4, size, np.float32))
        assert bool(found) == (step == 4)
