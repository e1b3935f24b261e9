"""What a worker says that it trains: whatever else arrives is a refusal, and what differs is a sentence."""

import json
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.agree.policy import Async, Auto, Cadence, Sync
from potluck.errors import TheirProtocolError
from potluck.fleet import description
from potluck.fleet.description import BUFFERS, COUNTS, DIVISORS, MAX_FLOATS, MOMENTS, Description, Part, settings_of
from potluck.wire.codec import encode
from potluck.wire.messages import AveragedBlockGradient, AveragedGradient, AveragedNonBlockGradient

DESCRIBED = Description(
    parts=(Part(1, None, (3, 4)), Part(0, None, (3, 4)), Part(None, 2, (12,)), Part(None, BUFFERS, (1, 0))),
    model="a hash",
    rows=1000,
    batch=32,
    slices=8,
    seed=7,
    unit=2.0**-5,
    samples_per_row=64.0,
    policy="sync",
    told={"name": "a run", "steps_total": 12},
)
TABLE = json.loads(DESCRIBED.to_json())
WINDOWED = replace(DESCRIBED, policy="async", settings=settings_of(Async.published(max_batch_diff=3)), rows_limit=5000)


def changed(**values: Any) -> str:
    return json.dumps(TABLE | values)


def test_a_description_comes_back_as_it_was() -> None:
    assert Description.from_json(DESCRIBED.to_json()) == DESCRIBED


def test_a_policy_comes_back_with_all_that_windows_are_planned_by() -> None:
    assert DESCRIBED.windowed is None and settings_of(Sync()) == {}
    assert Description.from_json(WINDOWED.to_json()) == WINDOWED
    assert WINDOWED.windowed == Async.published(max_batch_diff=3)
    for policy in (
        Cadence.published(anchor=4, overhead_target=0.2),
        Async.published(together=0.25, moments=True),
        Cadence(),
        Async(together=0.0),
        Auto(),
        Auto(together=0.0),
    ):
        described = replace(WINDOWED, policy=policy.kind, settings=settings_of(policy))
        found = Description.from_json(described.to_json()).windowed
        assert found == replace(policy, moments=policy.averages_moments)
        assert described.subtracts_only == (not policy.together and policy.kind != "auto")


def test_what_is_off_is_not_told() -> None:
    """An older version tells and expects none of it."""
    assert {*settings_of(Cadence.published())} == {"anchor", "max_anchor", "overhead_target", "max_batch_diff"}
    assert settings_of(Cadence.published(together=0.1))["together"] == 0.1 and "moments" not in settings_of(
        Cadence.published(together=0.1)
    )


def test_a_description_knows_how_many_batches_are_done() -> None:
    places = [(0, 0), (0, 1), (0, 32), (0, 33), (0, 1000), (1, 0), (1, 40)]
    assert [DESCRIBED.steps_at(*place) for place in places] == [0, 1, 1, 2, 32, 32, 34]


def test_it_knows_its_floats_and_blocks() -> None:
    assert DESCRIBED.floats == 27 and DESCRIBED.blocks == 2
    assert [part.key for part in DESCRIBED.parts] == [("block", 1), ("block", 0), ("component", 2), ("component", 255)]


def test_what_optimizers_keep_and_buffers_are_no_parameters() -> None:
    kept = (Part(MOMENTS, None, (3, 4)), Part(DIVISORS, None, (3, 4)), Part(None, COUNTS, (2,)))
    assert DESCRIBED.parameters == 26 and replace(DESCRIBED, parts=(*DESCRIBED.parts, *kept)).parameters == 26


def with_parts(*floats: int) -> Description:
    return replace(DESCRIBED, parts=(*(Part(n, None, (size,)) for n, size in enumerate(floats)), DESCRIBED.parts[-1]))


@pytest.mark.parametrize(
    ("floats", "sentence"),
    [
        ((24_999_994,), None),  # 99,999,997 bytes
        ((24_999_995,), "whole gradient is a message of 100,000,001 bytes.* so that it cannot take part at all"),
        ((20_000_000, 20_000_000), "of 160,000,021 bytes.*above 100,000,000. It can take part if it sends block"),
        ((24_999_992, 9), "It can take part if it sends block gradients"),  # 99,999,997 bytes
        ((24_999_993, 9), "That of block 0 alone is 100,000,001"),
    ],
)
def test_averages_that_entrenars_client_refuses_are_told(floats: tuple[int, ...], sentence: str | None) -> None:
    told = with_parts(*floats).too_large_for_entrenar()
    assert told is None if sentence is None else re.search(sentence, told or "")


def test_the_bytes_that_are_told_are_those_that_travel() -> None:
    described = with_parts(5, 7)
    with mock.patch.object(description, "ENTRENAR_BYTES", 60):
        told = described.too_large_for_entrenar() or ""
    whole = AveragedGradient(1, np.zeros(12, np.float32), np.float32(0))
    assert f"a message of {len(encode(whole, 'entrenar')) - 4} bytes" in told
    part = AveragedBlockGradient(1, 1, np.zeros(7, np.float32), np.array([7], "<u4"))
    with mock.patch.object(description, "ENTRENAR_BYTES", 50):
        told = described.too_large_for_entrenar() or ""
    assert f"That of block 1 alone is {len(encode(part, 'entrenar')) - 4}," in told
    assert len(encode(AveragedNonBlockGradient(1, 0, np.zeros(7, np.float32)), "entrenar")) - 4 == 18 + 4 * 7


def test_under_windows_there_are_no_plain_peers_to_warn() -> None:
    assert replace(WINDOWED, parts=with_parts(1 << 28).parts).too_large_for_entrenar() is None


def part(**values: Any) -> list[dict[str, Any]]:
    return [{"block": 0, "component": None, "sizes": [1]} | values]


MALFORMED = {
    "nothing": "",
    "no JSON": "{",
    "a number": "1",
    "a string": '"parts"',
    "null": "null",
    "a list": "[]",
    "an empty table": "{}",
    "not UTF-8 once decoded": '"\\ud800"',
    "parts missing": json.dumps({k: v for k, v in TABLE.items() if k != "parts"}),
    "model missing": json.dumps({k: v for k, v in TABLE.items() if k != "model"}),
    "something more": changed(more=1),
    "parts a number": changed(parts=1),
    "parts a string": changed(parts="ab"),
    "parts a table": changed(parts={"block": 1}),
    "no parts": changed(parts=[]),
    "a part a number": changed(parts=[1]),
    "a part a list": changed(parts=[[]]),
    "a part without sizes": changed(parts=[{"block": 0, "component": None}]),
    "a part without a place": changed(parts=part(block=None)),
    "a part with two places": changed(parts=part(component=1)),
    "block below 0": changed(parts=part(block=-1)),
    "block a float": changed(parts=part(block=1.0)),
    "block true": changed(parts=part(block=True)),
    "block a string": changed(parts=part(block="0")),
    "component 256": changed(parts=part(block=None, component=256)),
    "sizes a number": changed(parts=part(sizes=3)),
    "sizes a string": changed(parts=part(sizes="12")),
    "sizes a table": changed(parts=part(sizes={"1": 2})),
    "sizes empty": changed(parts=part(sizes=[])),
    "sizes zero": changed(parts=part(sizes=[0])),
    "sizes below 0": changed(parts=part(sizes=[5, -1])),
    "sizes a float": changed(parts=part(sizes=[1.5])),
    "sizes of lists": changed(parts=part(sizes=[[1]])),
    "sizes true": changed(parts=part(sizes=[True])),
    "sizes null": changed(parts=part(sizes=[None])),
    "a part too large": changed(parts=part(sizes=[MAX_FLOATS + 1])),
    "two parts alike": changed(parts=part() * 2),
    "rows 0": changed(rows=0),
    "rows a float": changed(rows=10.0),
    "rows a string": changed(rows="10"),
    "rows a list": changed(rows=[1]),
    "rows null": changed(rows=None),
    "batch below 0": changed(batch=-32),
    "batch true": changed(batch=True),
    "slices 0": changed(slices=0),
    "slices too many": changed(slices=(1 << 16) + 1),
    "unit 0": changed(unit=0),
    "unit above 1": changed(unit=1.5),
    "unit NaN": changed(unit=float("nan")),
    "unit infinite": changed(unit=float("inf")),
    "unit a string": changed(unit="0.5"),
    "unit null": changed(unit=None),
    "samples per row 0": changed(samples_per_row=0),
    "samples per row infinite": changed(samples_per_row=float("inf")),
    "samples per row NaN": changed(samples_per_row=float("nan")),
    "samples per row a list": changed(samples_per_row=[1]),
    "a policy that nobody knows": changed(policy="never"),
    "settings a list": changed(settings=[]),
    "settings of sync": changed(settings={"anchor": 1}),
    "settings missing": changed(policy="cadence"),
    "a setting missing": changed(policy="async", settings={"anchor": 1}),
    "a setting more": changed(policy="async", settings=WINDOWED.settings | {"more": 1}),
    "anchor 0": changed(policy="async", settings=WINDOWED.settings | {"anchor": 0}),
    "anchor true": changed(policy="async", settings=WINDOWED.settings | {"anchor": True}),
    "anchor a float": changed(policy="async", settings=WINDOWED.settings | {"anchor": 1.5}),
    "anchor null": changed(policy="async", settings=WINDOWED.settings | {"anchor": None}),
    "overhead_target a string": changed(policy="async", settings=WINDOWED.settings | {"overhead_target": "0.1"}),
    "overhead_target infinite": changed(policy="async", settings=WINDOWED.settings | {"overhead_target": float("inf")}),
    "threshold NaN": changed(policy="async", settings=WINDOWED.settings | {"divergence_threshold": float("nan")}),
    "overlap, which was removed": changed(policy="async", settings=WINDOWED.settings | {"overlap": True}),
    "outer, which was removed": changed(policy="async", settings=WINDOWED.settings | {"outer": {"lr": 0.7}}),
    "moments a number": changed(policy="async", settings=WINDOWED.settings | {"moments": 1}),
    "rows_limit below 0": changed(rows_limit=-1),
    "rows_limit a float": changed(rows_limit=1.0),
    "data a list": changed(data=[]),
    "data without marks": changed(data={"origin": ""}),
    "data with more": changed(data={"origin": "", "marks": {}, "more": 1}),
    "marks a list": changed(data={"origin": "", "marks": []}),
    "a mark of no row": changed(data={"origin": "", "marks": {"-1": ["a", []]}}),
    "a mark of a row beyond all": changed(data={"origin": "", "marks": {"9" * 5000: ["a", []]}}),
    "a mark cut short": changed(data={"origin": "", "marks": {"0": ["a"]}}),
    "a mark that is a number": changed(data={"origin": "", "marks": {"0": 1}}),
    "a mark without a hash": changed(data={"origin": "", "marks": {"0": [1, []]}}),
    "a mark with words": changed(data={"origin": "", "marks": {"0": ["a", ["b"]]}}),
    "a mark with NaN": changed(data={"origin": "", "marks": {"0": ["a", [float("nan")]]}}),
    "a mark with too much": changed(data={"origin": "", "marks": {"0": ["a", [1.0] * 4]}}),
    "too many marks": changed(data={"origin": "", "marks": {str(row): ["a", []] for row in range(65)}}),
    "an origin that moves the cursor": changed(data={"origin": "\x1b[2J", "marks": {}}),
    "an origin without end": changed(data={"origin": "a" * 201, "marks": {}}),
    "training a list": changed(training=[]),
    "training that moves the cursor": changed(training={"optimizer": "\x1b[2J"}),
    "told a list": changed(told=[]),
    "told null": changed(told=None),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(TheirProtocolError, match=r"^Ready.description is not one: .+\.$"):
        Description.from_json(text)


def test_more_parts_than_a_model_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MAX_PARTS", 3)
    with pytest.raises(TheirProtocolError, match="between 1 and 3 parts"):
        Description.from_json(DESCRIBED.to_json())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"parts":' * 100_000, '[{"a":' * 50_000])
def test_a_bottomless_description_is_refused(text: str) -> None:
    with pytest.raises(TheirProtocolError):
        Description.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "one"), ("seed", [1]), ("model", 5), ("model", None), ("policy", {}), ("rows", 1 << 70)],
)
def test_a_field_of_another_type_or_beyond_what_a_message_can_say_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TheirProtocolError):
        Description.from_json(changed(**{name: value}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*TABLE, "block", "component", "sizes"]), json_values)
def test_any_value_in_any_place_is_a_description_or_a_refusal(name: str, value: Any) -> None:
    text = changed(**{name: value}) if name in TABLE else changed(parts=part(**{name: value}))
    try:
        found = Description.from_json(text)
    except TheirProtocolError:
        return
    assert found.floats > 0 and found.rows > 0 and found.batch > 0 and 0 < found.slices <= 1 << 16


@given(st.text(max_size=40) | json_values.map(json.dumps))
def test_any_text_is_a_description_or_a_refusal(text: str) -> None:
    with pytest.raises(TheirProtocolError):
        Description.from_json(text)


# Differences


def test_what_is_told_to_people_may_differ() -> None:
    assert DESCRIBED.difference(replace(DESCRIBED, told={}, rows_limit=7)) is None


BUILD = " Build the same model, data and settings on every worker."


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "another"}, "Your parameter names, shapes or types are not those that this run trains."),
        (
            {"parts": DESCRIBED.parts[:2]},
            "Your gradient travels in other parts than this run's. The first is component 2: 12 numbers here, and no"
            " such part of yours.",
        ),
        ({"policy": "cadence", "parts": DESCRIBED.parts[:2]}, "This run's policy is sync, and yours is cadence."),
        (
            {"model": "another", "parts": DESCRIBED.parts[:2]},
            "Your parameter names, shapes or types are not those that this run trains: it trains 26"
            " numbers, and your model 14.",
        ),
        ({"policy": "cadence"}, "This run's policy is sync, and yours is cadence."),
        ({"rows": 999}, "This run has rows = 1000, and you have 999."),
        ({"batch": 64}, "This run has batch = 32, and you have 64."),
        ({"slices": 4}, "This run has slices = 8, and you have 4."),
        ({"seed": 8}, "This run has seed = 7, and you have 8."),
        ({"unit": 0.5}, "This run has unit = 0.03125, and you have 0.5."),
    ],
)
def test_a_difference_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    assert DESCRIBED.difference(replace(DESCRIBED, **change)) == sentence + BUILD


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("anchor", 5, "This run has policy.anchor = 10, and you have 5."),
        ("max_batch_diff", None, "This run has policy.max_batch_diff = 3, and you have None."),
        ("divergence_threshold", 0.1, "This run has policy.divergence_threshold = 0.05, and you have 0.1."),
        ("moments", True, "This run has policy.moments = False, and you have True."),
    ],
)
def test_a_differing_setting_of_the_policy_is_named(name: str, value: Any, sentence: str) -> None:
    assert WINDOWED.difference(replace(WINDOWED, settings=WINDOWED.settings | {name: value})) == sentence + BUILD


MARKS = {"0": ["aa", []], "9": ["bb", [1.0, 2.0, 3.0]]}


def with_data(marks: dict[str, Any], origin: str = "") -> Description:
    return replace(DESCRIBED, data={"origin": origin, "marks": marks})


def test_other_data_of_as_many_rows_are_refused_with_what_to_do() -> None:
    mine = with_data(MARKS)
    assert mine.difference(with_data(MARKS | {"9": ["bb", [1.0005, 2.0, 3.0]]})) is None  # the last bits
    said = mine.difference(with_data(MARKS | {"9": ["cc", [1.0, 2.0, 3.0]]}))
    assert said is not None and said.startswith(
        "Your data have as many rows as this run's, but what is in them is not the same: row 9 is another. Give every"
        " worker the same data in the same order: with --data PATH"
    )
    said = mine.difference(with_data({"0": ["dd", []], "9": ["cc", []]}))
    assert said is not None and "row 0 is another, and so are 1 more of the 2 that were compared" in said
    said = with_data({"all": ["aa", []]}, "Python 3.12").difference(with_data({"all": ["bb", []]}, "Python 3.11"))
    assert said is not None and "not the same (this run's: Python 3.12; yours: Python 3.11). Give" in said
    assert said.endswith("with the same version of Python.")


def test_another_way_to_train_is_refused_by_name() -> None:
    mine = replace(DESCRIBED, training={"optimizer.lr": 0.1, "step.clip": None})
    said = mine.difference(replace(DESCRIBED, training={"optimizer.lr": 0.2, "step.clip": None}))
    assert said == "This run has optimizer.lr = 0.1, and you have 0.2." + BUILD


def test_an_older_description_loads_and_is_completed_by_the_first_that_knows_more() -> None:
    table = json.loads(DESCRIBED.to_json())
    del table["data"], table["training"]
    old = Description.from_json(json.dumps(table))
    new = replace(with_data(MARKS), training={"optimizer.lr": 0.1})
    assert old.difference(new) is None and new.difference(old) is None
    assert old.completed(new) == replace(new, told=old.told)
    assert new.completed(old) == new
