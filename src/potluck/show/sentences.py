"""Events as sentences, for the terminal and the page: what was decided, who came and went, what was saved. Pure."""

import re
from typing import Any, NamedTuple

from potluck.words import duration, plural, size

Record = dict[str, Any]
"""One event, as events.jsonl has it."""


STYLES = {"plain": "cyan", "good": "green", "notice": "yellow", "bad": "red"}
"""The colour of each tone of a sentence, in a terminal."""
STACK_SHOWN = 3
"""The most calls that are shown of a worker that is stuck."""


class Sentence(NamedTuple):
    kind: str
    tone: str
    """plain, good, notice or bad: how it is coloured."""
    text: str


def sentence_of(record: Record) -> Sentence | None:
    """None: it is shown elsewhere, such as a step."""
    kind = str(record.get("event"))
    told = _SENTENCES.get(kind)
    return Sentence(kind, *told(record)) if told is not None else None


def without_figures(reason: str) -> str:
    """Leave out the figures of a reason: that one of them has moved is no news."""
    return re.sub(r"\d[\d.,]*", "", reason)


def _started(event: Record) -> tuple[str, str]:
    where = f"Continuing from step {event['from_step']:,}" if event.get("from_step") else "The run begins"
    return "plain", f"{where}, on {plural(int(event['workers']), 'worker')}."


def _epoch(event: Record) -> tuple[str, str]:
    is_right = event["same_weights"] and event["used"] == event["total"]
    return ("bad" if not is_right else "notice" if event.get("not_compared") else "good"), str(event["sentence"])


def _went(event: Record) -> tuple[str, str]:
    now = f"{plural(int(event['workers']), 'worker')} now."
    if event["polite"]:
        return "plain", f"{event['name']} left ({event['reason']}); {now}"
    if event.get("refused"):
        reason = str(event["reason"]).removesuffix(".")
        again = " The others compute its part again." if event.get("owed") and event["workers"] else ""
        return "bad", f"{event['name']} was turned away: {reason}.{again} {now[:1].upper()}{now[1:]}"
    if not event.get("took_part", True):
        return "notice", f"{event['name']} went before it took part ({event['reason']}); {now}"
    again = "the others compute its part again; " if event.get("owed") and event["workers"] else ""
    return "bad", f"{event['name']} is lost ({event['reason']}); {again}{now}{_place(event)}"


def _place(event: Record) -> str:
    """Tell where a worker is stuck, if it said so: the innermost calls, of which events.jsonl has more."""
    calls = str(event.get("stack") or "").splitlines()[:STACK_SHOWN]
    return f" It was at {', called at '.join(calls)}." if calls else ""


def _went_back(event: Record) -> tuple[str, str]:
    source = f"from the checkpoint of step {event['step']:,}" if event["step"] else "from the start: none was saved"
    lost = int(event["from_step"] - event["step"])
    return "bad", (
        f"Nobody has the weights of step {event['from_step']:,} any more. The run continues {source};"
        f" {plural(lost, 'step')} {'is' if lost == 1 else 'are'} trained again."
    )


def _recovered(event: Record) -> tuple[str, str]:
    lost = ", ".join(map(str, event["lost"]))
    return "notice", (
        f"Lost worker {lost}; the others continue from step {event['step']:,}, which they had kept in memory;"
        f" {plural(int(event['workers']), 'worker')} now."
    )


def _stalled(event: Record) -> tuple[str, str]:
    for_s = f" for {event['seconds']:.0f} s" if event["seconds"] else ""
    then = f"; {event['then']}" if event.get("then") else ""
    return "notice", f"Waiting for {event['name']}: {event['doing']}{for_s}{then}.{_place(event)}"


def _ended(event: Record) -> tuple[str, str]:
    took, step = duration(event["seconds"]), f"{plural(int(event['step']), 'step')}"
    match event["reason"]:
        case "finished":
            return "good", f"Finished after {step}, in {took}."
        case "interrupted":
            return "notice", f"Stopped after {step}, in {took}."
        case reason:
            return "bad", f"Ended after {step}: {reason}"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].removesuffix(".") + "."


_SENTENCES = {
    "run_started": _started,
    "decided": lambda e: ("plain", _sentence(e["reason"])),
    "step_skipped": lambda e: ("notice", f"Step {e['step']:,} was skipped on all workers: {e['reason']}."),
    "epoch_done": _epoch,
    "checkpoint_saved": lambda e: ("plain", f"Step {e['step']:,}: saved {e['folder']} ({size(e['bytes'])})."),
    "checkpoint_failed": lambda e: ("bad", f"{_sentence(e['reason'])} Training continues, and it is tried again."),
    "checkpoint_passed_over": lambda e: ("notice", f"Passed over a checkpoint: {e['reason']}"),
    "noticed": lambda e: ("notice", e["sentence"]),
    "worker_came": lambda e: ("plain", f"{e['name']} joined ({e['kind']}); {plural(int(e['workers']), 'worker')} now."),
    "worker_went": _went,
    "recovered": _recovered,
    "went_back": _went_back,
    "stalled": _stalled,
    "ordered": lambda e: ("notice", e["sentence"]),
    "run_ended": _ended,
}
