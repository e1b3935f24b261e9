"""Views: a page is sent all of a view at first, and from then on only what has changed. Pure.

A view is of bounded size. Of a thousand workers' rows only those travel whose figures differ from what was sent.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.page.fold import Fold, WorkerRow
from potluck.page.series import Series, short
from potluck.show.sentences import Record
from potluck.words import count, percent, plural, size

MOST_ROWS = 2000
"""Workers that are listed."""
MOST_SETTINGS, MOST_OF_SETTING = 300, 300
"""Settings that are shown, and letters of one."""
NO_USES: Mapping[int, Record] = {}
BYTES_OF = {"": 4.0, "fp32": 4.0, "bf16": 2.0, "int8": 1.03, "int4": 0.53}
"""About how many bytes a number takes on its way; of `auto` nobody knows."""


def head_of(fold: Fold, now: Record) -> Record:
    """The figures at the top: where the run stands."""
    run, last = fold.run, fold.last
    left = fold.left_s()
    total = run.get("steps_total", 0)
    known = _told(now)
    inside = [row for row in fold.workers.values() if _is_in(fold, row, known, now)]
    devices = [row.device or run.get("device_name", "") for row in inside]
    step = max(last.get("step", 0), run.get("from_step", 0)) if last else run.get("from_step", 0)
    return {
        "step": step,
        "total": total,
        "epoch": last.get("epoch", 0),
        "rows": last.get("rows_seen", 0),
        "loss": short(_number(last.get("loss"))),
        "lr": short(_number(last.get("lr"))),
        "norm": short(_number(last.get("grad_norm"))),
        "rate": short(fold.rate),
        "left": [short(figure) for figure in left] if left else None,
        "mfu": short(fold.usage(devices)),
        "trained_s": short(fold.trained_s),
        "step_at": last.get("time"),
        "step_s": short(last.get("seconds")),
        "skipped": fold.skipped,
        "epochs": [fold.epochs_right, fold.epochs_done],
        "workers": len(inside),
        "ended": fold.ended and {name: fold.ended[name] for name in ("reason", "step", "seconds", "time")},
        "paused": bool(now.get("paused")),
        "saving": bool(now.get("saving")),
        "bytes": bytes_of(fold, now),
        "waits_for": now.get("waits_for", 0),
    }


def bytes_of(fold: Fold, now: Record) -> Record | None:
    """Return the bytes that have travelled: counted by a host; in a group computed, from the model's size and its
    steps."""
    if told := now.get("bytes"):
        return {"sent": told["sent"], "received": told["received"], "saved": told["saved"], "counted": True}
    run, wire = fold.run, fold.run.get("wire", "")
    world, steps = run.get("workers", 0), sum(point.steps for point in fold.series.points)
    if world < 2 or wire not in BYTES_OF or run.get("layout") or run.get("policy") not in ("sync", ""):
        return None
    each = 2 * (world - 1) * run.get("parameters", 0) * steps
    return {
        "sent": each * BYTES_OF[wire],
        "received": None,
        "saved": each * (4.0 - BYTES_OF[wire]) * (wire not in ("", "fp32")),
        "counted": False,
    }


def _told(now: Record) -> dict[int, Record]:
    return {row["id"]: row for row in now.get("workers", ())}


def _is_in(fold: Fold, row: WorkerRow, told: dict[int, Record], now: Record) -> bool:
    """Not one that its host no longer knows, such as one that came before that was killed, and computed nothing."""
    is_whole = "workers" in now and len(told) >= now.get("members", 0)  # of a crowd, not all are told of
    is_lost = is_whole and row.id not in told and now["time"] > row.at + 2.0
    return fold.takes_part(row) and (bool(fold.ended) or not is_lost)


def rows_of(fold: Fold, now: Record, uses: Mapping[int, Record] = NO_USES) -> dict[int, list[Any]]:
    """List the figures of each worker: name, device, rows, share, speed, busy, wait, send, link, phase, doing, heard
    at, why, is in, what it uses of its machine.

    `uses`: what ranks of a group on this machine use of it; workers of a host are in `now`."""
    live_rows, told_at = _told(now), now.get("time", 0.0)
    inside = {row.id: row for row in fold.workers.values() if _is_in(fold, row, live_rows, now)}
    rows_now = sum(row.rows for row in inside.values())
    speeds = sum(row.speed or 0.0 for row in inside.values())
    rows: dict[int, list[Any]] = {}
    for row in list(fold.workers.values())[-MOST_ROWS:]:
        live = live_rows.pop(row.id, None)
        rows[row.id] = _row(fold, row, live, row.id in inside, (rows_now, speeds), told_at)
        used = live.get("uses") if live is not None else uses.get(row.id)
        rows[row.id].append(machine_of(used) if used and row.id in inside and not fold.ended else None)
    for live in list(live_rows.values())[:MOST_ROWS]:  # those that are not ready yet
        fresh = WorkerRow(live["id"], live["name"], live.get("kind", ""))
        rows[fresh.id] = [*_row(fold, fresh, live, True, (0, 0.0), told_at), None]
    return rows


def _row(
    fold: Fold, row: WorkerRow, live: Record | None, is_in: bool, sums: tuple[int, float], told_at: float
) -> list[Any]:
    rows_now, speeds = sums
    took = row.busy + row.wait + row.send
    share = row.rows / rows_now if rows_now and is_in else 0.0
    heard_at = told_at - live["silent_s"] if live is not None else row.at
    return [
        row.name,
        row.device.split(";")[0].strip() or fold.run.get("device_name") or fold.run.get("device", ""),
        row.rows,
        short(share),
        short(row.speed),
        short(row.busy / took) if took else None,
        short(row.wait / took) if took else None,
        short(row.send / took) if took else None,
        link_of(live) if live is not None else "",
        "done" if is_in and fold.ended else (live["phase"] if live is not None else "in") if is_in else "gone",
        live["doing"] if live is not None and is_in and not fold.ended else "",
        round(heard_at, 1),
        why_of(fold, row, share, speeds) if is_in else "",
        is_in,
    ]


def machine_of(uses: Record) -> list[list[Any]]:
    """List what a worker uses of its machine, as [name, share, text] each; empty if it cannot be read."""
    try:
        cores, of_cores = float(uses["cores"]), int(uses["of_cores"])
        found = [["processor", short(cores / max(1, of_cores)), f"{cores:.1f} of {plural(of_cores, 'core')}"]]
        for name, kept in (("memory", "memory_bytes"), ("GPU memory", "gpu_bytes")):
            if whole := int(uses[f"of_{kept}"]):
                found.append([name, short(uses[kept] / whole), f"{size(uses[kept])} of {size(whole)}"])
        if uses["of_gpu_bytes"]:
            found.insert(1, ["GPU", short(float(uses["gpu"])), f"{percent(float(uses['gpu']))} busy"])
        return found
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return []


def link_of(live: Record) -> str:
    """Say where a worker is, and how far away."""
    if not live.get("address"):
        return "this machine"
    rtt = live.get("rtt_s")
    return f"{live['address']}, {1000 * rtt:.3g} ms" if rtt else str(live["address"])


def why_of(fold: Fold, row: WorkerRow, share: float, speeds: float) -> str:
    """Why it has this share, as a sentence."""
    if not row.rows_seen and row.speed is None:
        return "It has computed nothing yet."
    unit = fold.run.get("unit", "rows")
    if row.speed is None or not speeds or len(fold.workers) < 2:
        return ""
    of_speed = row.speed / speeds
    told = f"It computes {count(row.speed)} {unit}/s, {percent(of_speed)} of what all do together"
    if abs(share - of_speed) <= 0.02 + 0.1 * of_speed:
        return f"{told}, and so has {percent(share)} of the rows."
    return f"{told}, and has {percent(share)} of the rows: shares are whole slices, and change slowly."


def run_of(fold: Fold) -> Record:
    run = fold.run
    names = ("name", "folder", "workers", "device", "parameters", "unit", "batch_size", "steps_total", "from_step")
    more = ("layout", "strategy", "policy", "wire", "device_name")
    settings = settings_of(run.get("settings") or {})
    told = {name: run.get(name) for name in (*names, *more)}
    return told | {"settings": settings, "at": run.get("time"), "known": bool(run)}


def settings_of(table: dict[str, Any]) -> dict[str, str]:
    """Flatten a table of settings: what is within a table has its name before it."""
    flat: dict[str, str] = {}
    waiting = [("", table)]
    while waiting and len(flat) < MOST_SETTINGS:
        before, inner = waiting.pop(0)
        for name, value in inner.items():
            if isinstance(value, dict):
                waiting.append((f"{before}{name}.", value))
            elif len(flat) < MOST_SETTINGS:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                flat[f"{before}{name}"[:MOST_OF_SETTING]] = text[:MOST_OF_SETTING]
    return flat


def cells_of(fold: Fold, start: int) -> list[list[Any]]:
    """List the cells of the timeline: the beginning and end of each, and for each lane how much of it was busy, and
    sending."""
    cells = []
    for cell in fold.timeline.points[start:]:
        shares: list[Any] = []
        for lane in fold.lanes:
            seconds = cell.done.get(lane)
            whole = sum(seconds) if seconds is not None else 0.0
            shares.append([round(100 * seconds[0] / whole), round(100 * seconds[2] / whole)] if whole else None)  # type: ignore[index]
        cells.append([short(cell.start_s), short(cell.end_s), shares])
    return cells


@dataclass(slots=True)
class Viewer:
    """Remembers what one page has been sent so far."""

    lines: dict[str, tuple[int, int, Any]] = field(default_factory=dict)
    """(generation, points, the last of them) of each series."""
    rows: dict[int, list[Any]] = field(default_factory=dict)
    stories: int = 0
    printed: int = 0
    sections: dict[str, Any] = field(default_factory=dict)

    def update(
        self,
        fold: Fold,
        now: Record,
        more: Record,
        *,
        with_rows: bool = True,
        uses: Mapping[int, Record] = NO_USES,
    ) -> Record:
        """Return what has changed since the last update. `more`: what is not of the run, such as what a person may do
        here. `with_rows`: include rows of workers; there may be many. `uses`: see rows_of()."""
        sent: Record = {}
        sections = {
            "run": run_of(fold),
            "head": head_of(fold, now),
            "looks": fold.looks,
            "epochs": list(fold.epochs),
            "samples": list(fold.samples),
            **more,
        }
        for name, section in sections.items():
            if self.sections.get(name) != section:
                sent[name] = section
                self.sections[name] = list(section) if isinstance(section, list) else section
        points = fold.series.points
        if (line := self._told("points", fold.series, lambda at: [each.told() for each in points[at:]])) is not None:
            sent["series"] = line | {"span": fold.series.span}
        if (line := self._told("cells", fold.timeline, lambda start: cells_of(fold, start))) is not None:
            names = [fold.workers[lane].name if lane in fold.workers else str(lane) for lane in fold.lanes]
            sent["timeline"] = line | {"lanes": fold.lanes, "names": names}
        if with_rows:
            self._add_rows(rows_of(fold, now, uses), sent)
        if fold.stories > self.stories:
            sent["story"] = fold.story(self.stories)
            self.stories = fold.stories
        return sent

    def new_lines(self, lines: Iterable[tuple[int, float, str, str]]) -> list[list[Any]]:
        """List those of the lines that a script printed which this page has not been sent."""
        found = [line for line in lines if line[0] > self.printed]
        self.printed = found[-1][0] if found else self.printed
        return [list(line) for line in found]

    def _told(self, name: str, series: Series[Any], told: Callable[[int], list[Any]]) -> Record | None:
        """Return the points from the last one on that the page has, which may have changed; None: none has."""
        generation, count, last = self.lines.get(name, (-1, 0, None))
        start = max(0, count - 1) if generation == series.generation else 0
        points = told(start)
        self.lines[name] = series.generation, len(series.points), points[-1:]
        return {"start": start, name: points} if start == 0 or len(points) > 1 or last != points else None

    def _add_rows(self, rows: dict[int, list[Any]], sent: Record) -> None:
        changed = {id: row for id, row in rows.items() if self.rows.get(id) != row}
        gone = [id for id in self.rows if id not in rows]
        if changed or gone:
            sent["workers"] = {"changed": changed, "gone": gone}
        self.rows = rows


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
