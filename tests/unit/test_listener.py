"""What a worker hears: averages among the messages, put together by their step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from potluck.fleet.client import Average, Client
from potluck.fleet.description import Part
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.invite import Invite
from potluck.fleet.listener import Listener
from potluck.wire.messages import Admitted, Committed, Shutdown
from tests.unit.test_description import DESCRIBED

PARTS = (Part(1, None, (2,)), Part(0, None, (3,)))


class Spoken(Client):
    """In place of a client: what a host would say."""

    def __init__(self, *said: Any) -> None:
        super().__init__(Invite("127.0.0.1", 1, "", None), name="w", kind="cpu", say=lambda sentence: None)
        self.description = replace(DESCRIBED, parts=PARTS)
        self._said = list(said)

    def receive(self, timeout_s: float | None = None) -> Any:
        return self._said.pop(0) if self._said else ConnectionLost("it hung up")


def average(step: int, part: int, value: float) -> Average:
    return Average(step, part, np.full(PARTS[part].floats, value, np.float32))


COMMITTED = Committed(6, 1, 1.0, 0.5, b"", 3, 0, '{"workers": []}')


def test_an_average_may_come_after_the_commit_and_messages_between_are_heard_later() -> None:
    listener = Listener(Spoken(average(6, 1, 1.0), COMMITTED, Shutdown(), average(6, 0, 2.0)))
    assert listener.receive() is COMMITTED
    means = listener.take_means(6)
    assert means is not None and [part.tolist() for part in means.parts] == [[2.0] * 2, [1.0] * 3]
    assert isinstance(listener.receive(), Shutdown) and isinstance(listener.receive(), ConnectionLost)


def test_parts_that_do_not_travel_are_not_waited_for_and_a_loss_is_heard_again() -> None:
    listener = Listener(Spoken(average(6, 1, 1.0)))
    assert listener.take_means(6) is None
    means = listener.take_means(6, without=frozenset({0}))
    assert means is not None and means.missing == {0}
    assert isinstance(listener.receive(), ConnectionLost)


def test_an_average_that_comes_again_takes_the_place_of_the_first() -> None:
    listener = Listener(Spoken(*(average(6, part, value) for value in (1.0, 2.0) for part in (0, 1)), COMMITTED))
    assert listener.receive() is COMMITTED
    means = listener.take_means(6)
    assert means is not None and [part[0] for part in means.parts] == [2.0, 2.0]


def test_averages_of_other_weights_and_of_steps_that_are_in_them_are_discarded() -> None:
    """Those of a step that the run went back before are formed again."""
    admitted = Admitted(3, 1, "{}")
    after = [average(3, 0, 2.0), average(4, 0, 3.0), average(4, 1, 3.0)]
    listener = Listener(Spoken(average(6, 0, 1.0), average(6, 1, 1.0), admitted, *after, Shutdown()))
    listener.pass_over_until(5)
    assert listener.receive() is admitted and isinstance(listener.receive(), Shutdown)
    assert listener.take_means(6) is None and listener.take_means(3, without=frozenset({1})) is None
    assert listener.take_means(4) is not None


def test_memory_that_was_given_back_is_used_again_for_the_same_part() -> None:
    client = Spoken(average(6, 0, 1.0), average(6, 1, 2.0))
    listener = Listener(client)
    means = listener.take_means(6)
    assert means is not None
    listener.give_back(means)
    session: Any = None
    assert [client._room(session, part) is means.parts[part] for part in (1, 0, 0)] == [True, True, False]


def test_of_a_broken_connection_no_average_is_overwritten_before_it_was_taken() -> None:
    """Though one that came before it was: they come one by one only while the connection holds."""
    client = Spoken()
    client.take_averages_one_by_one(3)
    session: Any = SimpleNamespace(unreleased=0, is_broken=True)
    client._session = session
    first, second, third = (client._room(session, 1) for _ in range(3))
    client.release(Average(6, 1, first))
    fourth = client._room(session, 1)
    assert not any(np.shares_memory(fourth, each) for each in (second, third))
    for each in (second, third, fourth):
        client.release(Average(6, 1, each))
    assert np.shares_memory(client._room(session, 0), fourth)
