"""CommunicationProtocol as published, and refusals of what is none."""

import json

import pytest

from potluck.stages.protocol import CommunicationProtocol, DataStore, Direct, Pipeline, from_json, to_json


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


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "protocol must be one of DataStore, Direct, Pipeline, not None"),
        ({"protocol": "Pigeon"}, "not 'Pigeon'"),
        ({"protocol": "Pipeline"}, "micro_batch_size"),
        ({"protocol": "Pipeline", "micro_batch_size": 0}, "at least 1, not 0"),
        ({"protocol": "Pipeline", "micro_batch_size": True}, "at least 1, not True"),
        ({"protocol": "Pipeline", "micro_batch_size": 4, "schedule": "fast"}, "schedule must be one of 1f1b"),
        ({"protocol": "Direct", "micro_batch_size": 4}, "Direct has no field 'micro_batch_size'; it has none"),
        ({"protocol": "DataStore", "url": "ftp://x/y"}, "url must be file:///some/folder"),
        ({"protocol": "DataStore", "url": "s3://"}, "url must be"),
    ],
)
def test_what_is_none_is_refused(data: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(data)
