"""Who waits for whom in a run under a host, since when, and what is owed: in sentences, from the coordinator. Pure.

`potluck why` says them of a run, and `potluck replay` of one that was recorded.
"""

from collections.abc import Collection, Sequence

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.ledger import Ledger
from potluck.fleet.membership import WorkerPhase, WorkerRecord, slices_of, unique_names
from potluck.fleet.tree import tell_slices
from potluck.words import duration, in_list, plural, size

MOST_NAMED = 8


def tell_waits(core: Coordinator, now: float, receivers: Collection[int] = (), held: Collection[int] = ()) -> str:
    """Say it in one sentence.

    `receivers`: peers that have not taken the averages which the next ones would replace. `held`: peers whose gradients
    the host leaves unread until others' have come, so that they are not who is waited for.
    """
    now, members = core.own_time(now), list(core.membership.members.values())
    late, what, since = _find_late(core, now, members, receivers, held)
    if not late:
        return what
    others = len(core.membership.ready) - sum(m.is_ready for m in late)
    who = f"The host and {plural(others, 'other worker')} wait" if others > 0 else "The host waits"
    silent = [m for m in late if m.silent_s(now) > core.patience_s / 4]
    heard = ""
    if silent:
        heard = f"; nothing was heard of {_names(silent)} for {duration(max(m.silent_s(now) for m in silent))}"
    which = "" if what.startswith("to ") else ", which is" if len(late) == 1 else ", each of which is"
    return f"{who} for {_names(late)}{which} {what}, for {duration(now - since)}{heard}."


def _find_late(
    core: Coordinator, now: float, members: list[WorkerRecord], receivers: Collection[int], held: Collection[int]
) -> tuple[list[WorkerRecord], str, float]:
    """Return the workers that are waited for, what they do, and since when; or nobody, and a sentence."""
    under = core.now
    if core.finished is not None:
        since = min((m.shut_at for m in members if m.shut_at is not None), default=now)
        return members, f"to end, since the run is over ({core.finished})", since
    if under is not None:
        owing = [m for m in members if m.nodes]
        silent = [m for m in owing if core.is_silent(m)]
        chosen = silent or [m for m in owing if m.is_computing]
        if not chosen and (takers := [m for m in members if m.peer in receivers]):
            return takers, f"to take the averages of step {core.steps_done:,}", under.last_report
        chosen = chosen or [m for m in owing if m.peer not in held] or owing
        if not chosen:
            return (
                [],
                f"Nobody owes anything of step {core.step_at(under.step):,}, which is not over: a fault of the host.",
                now,
            )
        what = chosen[0].doing(core.standing)
        what += f" of step {core.step_at(under.step):,}" if what.endswith("gradient") else ""
        return chosen, what, min(m.working_since for m in chosen)
    for call, gathering in core.gatherings.open.items():
        if missing := core.gatherings.missing(call):
            return (
                missing,
                f"to call fleet.mean() or fleet.gather() at step {core.step_at(call[0]):,}",
                gathering.last_at,
            )
    if looking := [m for m in members if m.evaluating]:
        return looking, "evaluating", min(m.evaluating_since for m in looking)
    if core.paused:
        return [], "A person has paused the run: nothing is handed out until somebody resumes it.", now
    if core.is_complete or core.stopping:
        return members, "to end, since all of the run is trained" if core.is_complete else "to stop", now
    return _find_missing(core, now, members)


def _find_missing(core: Coordinator, now: float, members: list[WorkerRecord]) -> tuple[list[WorkerRecord], str, float]:
    """Find why no step is under way, where nothing else is."""
    step, ready = core.steps_done, core.membership.ready
    behind = [m for m in ready if m.applied < core.standing.version and not m.plain]
    if ready and len(behind) == len(ready):
        return behind, f"applying step {step:,}", min(m.working_since for m in behind)
    if not ready and core.expected:
        return [], f"The host waits for those to come back who have the weights of step {step:,}.", now
    if catching := [m for m in members if m.phase is WorkerPhase.CATCHING_UP]:
        return catching, "catching up", min(m.came_at for m in catching)
    if building := [m for m in members if m.phase is WorkerPhase.GREETED]:
        return building, "building its model", min(m.came_at for m in building)
    needed = core.at_least if not step else 1
    if len(ready) < needed:
        return [], f"The host waits for workers to join: {len(ready)} here, and {needed} needed for a step.", now
    return [], "Nothing is under way, and nobody is waited for.", now


def _names(members: Sequence[WorkerRecord]) -> str:
    names = unique_names(members[:MOST_NAMED])
    if len(members) > MOST_NAMED:
        names.append(f"{len(members) - MOST_NAMED:,} more")
    return in_list(names)


def tell_owed(core: Coordinator, now: float) -> list[str]:
    """List what each worker does and owes, and what else is under way."""
    now, under, standing = core.own_time(now), core.now, core.standing
    lines = [f"Step {standing.step:,} is done, with {standing.rows_seen:,} rows."]
    if under is not None:
        missing = [number for number in range(under.slices) if number not in under.reports]
        told = f", and not reported: {', '.join(map(str, missing[:32]))}" if missing else ", all reported"
        since = duration(now - under.started)
        lines.append(
            f"Step {core.step_at(under.step):,} is under way for {since}: {plural(under.slices, 'slice')}{told}."
        )
    members = list(core.membership.members.values())
    for name, member in zip(unique_names(members), members, strict=True):
        owes = f", owes slices {_ranges(slices_of(member.nodes))}" if member.nodes else ""
        heard = f"heard {duration(member.silent_s(now))} ago" if not member.plain else "a plain peer"
        lines.append(f"{name}: {member.doing(standing)}{owes}, {heard}, applied step {core.step_at(member.applied):,}.")
    lines += _tell_under_way(core, now)
    if core.refused:
        refused = ", ".join(f"{kind} {count:,}" for kind, count in core.refused.most_common())
        lines.append(f"Turned away so far: {refused}.")
    return lines


def _tell_under_way(core: Coordinator, now: float) -> list[str]:
    def name(peer: int | None) -> str:
        member = core.membership.members.get(-1 if peer is None else peer)
        return member.name if member is not None else "the host's disk"

    lines = []
    for transfer in core.transfers.under_way.values():
        left = "which has not begun" if transfer.left is None else f"{size(transfer.left)} left"
        moved = duration(now - transfer.moved_at)
        lines.append(f"Weights from {name(transfer.sponsor)} to {name(transfer.to)}: {left}, moved {moved} ago.")
    for call, gathering in core.gatherings.open.items():
        missing = _names(core.gatherings.missing(call)) or "nobody"
        given, since = plural(len(gathering.given), "value"), duration(now - gathering.last_at)
        lines.append(f"Values at step {core.step_at(call[0]):,}: {given}, missing: {missing}, for {since}.")
    saving = core.saving
    if saving.is_under_way:
        step = f" of step {core.step_at(saving.due.step):,}" if saving.due is not None else ""
        doing = "is being written" if saving.is_writing else "has yet to come"
        sender = f" from {name(saving.sender)}" if saving.sender is not None and not saving.is_writing else ""
        lines.append(f"A checkpoint{step} {doing}{sender}.")
    for look in core.evaluations.open:
        lines.append(f"An evaluation at step {core.step_at(look[0]):,} is open.")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    return ", ".join(map(tell_slices, Ledger((number, number + 1) for number in sorted(numbers)).ranges))
