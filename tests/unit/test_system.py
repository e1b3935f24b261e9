"""What a system is asked for: ports to listen on."""

import pytest

from potluck.system import LEFT_ALONE, listen


def test_a_port_that_nobody_chose_is_one_that_no_connection_is_given_and_free_again_once_it_is_left() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
    assert ports[0] != ports[1] and all(port in LEFT_ALONE for port in ports)
    with listen("127.0.0.1", ports[0]) as again, pytest.raises(OSError, match="in use"):
        assert again.getsockname()[1] == ports[0]
        listen("127.0.0.1", ports[0])
