"""Events reach somebody slow in order, within bounds, and nobody who emits them waits."""

import threading

from potluck.event_queue import Outlet
from potluck.events import Event, Noticed, StepDone
from tests.unit.test_reporter import ENDED, STARTED, step


class Slow:
    """A listener that stands still until it may run."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.may_run = threading.Event()
        self.stands = threading.Event()

    def __call__(self, event: Event, at: float) -> None:
        self.stands.set()
        self.may_run.wait()
        self.heard.append(event)


def test_events_and_calls_arrive_in_the_order_in_which_they_were_put() -> None:
    slow, said = Slow(), []
    outlet = Outlet("Mine", slow, most=100)
    outlet(STARTED)
    outlet(step(1))
    outlet.call(lambda: said.append(len(slow.heard)))
    outlet(ENDED)
    assert slow.heard == []  # nobody waited for it
    slow.may_run.set()
    assert outlet.close(30)
    assert slow.heard == [STARTED, step(1), ENDED] and said == [2]


def test_a_listener_that_stands_still_costs_bounded_memory_and_hears_of_beginning_and_end() -> None:
    slow = Slow()
    outlet = Outlet("Mine", slow, most=10)
    outlet(Noticed(sentence="first"))
    slow.stands.wait()
    outlet(STARTED)
    for number in range(1000):
        outlet(step(number))
    outlet(ENDED)
    assert not outlet.drain(0.01)
    slow.may_run.set()
    assert outlet.close(30)
    steps = [event.step for event in slow.heard if isinstance(event, StepDone)]
    assert steps == list(range(992, 1000)) and [e for e in slow.heard if e in (STARTED, ENDED)] == [STARTED, ENDED]
    assert Noticed(sentence="Mine stood still, and 992 events before this one were left out.") in slow.heard


def test_one_event_that_cannot_be_told_is_passed_over_and_a_failure_ends_it() -> None:
    failed: list[BaseException] = []

    def listener(event: Event, at: float) -> None:
        if isinstance(event, StepDone) and event.step in raises:
            raise raises[event.step]
        heard.append(event)

    raises = {1: ValueError("a figure of a peer's"), 3: FileNotFoundError()}
    heard: list[Event] = []
    outlet = Outlet("Mine", listener, most=100, on_failure=failed.append)
    for number in range(6):
        outlet(step(number))
    assert outlet.close(30)
    assert heard == [step(0), step(2)] and [type(error) for error in failed] == [FileNotFoundError]
