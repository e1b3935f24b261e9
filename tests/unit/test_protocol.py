"""CommunicationProtocol as published, and refusals of what is none."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest

from potluck import CommunicationProtocol, DataStore, Direct, Pipeline, Stages, from_json, to_json
from potluck.config import from_dict
from potluck.errors import ConfigError
from potluck.stages.protocol import Schedule


@pytest.mark.parametrize(
    ("protocol", "text"),
    [
        (Pipeline(micro_batch_size=4), '{"protocol": "Pipeline", "micro_batch_size": 4}'),
        (Direct(), '{"protocol": "Direct"}'),
        (DataStore(url="s3://bucket/run"), '{"protocol": "DataStore", "url": "s3://bucket/run"}'),
        (
            Pipeline(micro_batch_size=2, schedule="gpipe"),
            '{"protocol": "Pipeline", "micro_batch_size": 2, "schedule": "gpipe"}',
        ),
    ],
)
def test_it_is_json_as_published(protocol: CommunicationProtocol, text: str) -> None:
    assert json.dumps(to_json(protocol)) == text
    assert from_json(json.loads(text)) == protocol


OURS = [
    DataStore(),
    DataStore(url="file:///tmp/x", micro_batch_size=3, keep_every=7, generation=2),
    Direct(),
    *(Pipeline(micro_batch_size=5, schedule=schedule) for schedule in get_args(Schedule)),
]


@pytest.mark.parametrize("protocol", OURS)
def test_every_field_comes_back_as_it_went(protocol: CommunicationProtocol) -> None:
    given = {field.name: getattr(protocol, field.name) for field in fields(protocol)}
    text = json.dumps(to_json(protocol))
    found = from_json(json.loads(text))
    assert found == protocol and {name: getattr(found, name) for name in given} == given


@pytest.mark.parametrize("protocol", OURS)
def test_what_the_published_reader_looks_at_is_there(protocol: CommunicationProtocol) -> None:
    """It takes the tag, and of a Pipeline the rows; keys that it does not know it passes over."""
    told = to_json(protocol)
    assert told["protocol"] == type(protocol).__name__
    if isinstance(protocol, Pipeline):
        assert type(told["micro_batch_size"]) is int and told["micro_batch_size"] == protocol.micro_batch_size


def test_a_published_store_loads_without_a_url_and_a_run_without_one_is_a_sentence() -> None:
    bare = from_json({"protocol": "DataStore"})
    assert bare == DataStore() and to_json(bare) == {"protocol": "DataStore"}
    with pytest.raises(ValueError, match=r"DataStore does not say where its store is\. Give its url before the run"):
        Stages(protocol=bare)
    with pytest.raises(ConfigError, match=r"^stages: DataStore does not say where"):
        from_dict(Stages, {"protocol": {"kind": "datastore"}}, "stages")
    assert isinstance(bare, DataStore)
    assert Stages(protocol=replace(bare, url="file:///tmp/x")).protocol == DataStore(url="file:///tmp/x")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "protocol must be one of DataStore, Direct, Pipeline, not None"),
        ({"protocol": "Pigeon"}, "not 'Pigeon'"),
        ({"protocol": ["Direct"]}, "protocol must be one of"),
        ({"protocol": "Pipeline"}, "Pipeline.micro_batch_size is missing"),
        (
            {"protocol": "Pipeline", "micro_batch_size": "4"},
            "Pipeline.micro_batch_size must be a whole number, not '4'",
        ),
        ({"protocol": "DataStore", "url": 4}, "DataStore.url must be a string, not 4"),
        ({"protocol": "DataStore", "keep_every": "often"}, "DataStore.keep_every must be a whole number, not 'often'"),
        ({"protocol": "Pipeline", "micro_batch_size": 0}, "at least 1, not 0"),
        ({"protocol": "Pipeline", "micro_batch_size": True}, "a whole number, not True"),
        ({"protocol": "Pipeline", "micro_batch_size": 4, "schedule": "fast"}, "schedule must be one of '1f1b'"),
        ({"protocol": "Direct", "micro_batch_size": 4}, "There is no setting Direct.micro_batch_size"),
        ({"protocol": "DataStore", "url": "ftp://x/y"}, "url must be file:///some/folder"),
        ({"protocol": "DataStore", "url": "s3://"}, "url must be"),
    ],
)
def test_what_is_none_is_refused(data: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_json(data)
