"""Notices that a machine is taken back: what each cloud answers, and a service on loopback that gives such answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from potluck.launch.notices import (
    ADDRESS,
    AZURE_TAG,
    PROVIDERS,
    Notice,
    NoticeWatch,
    decide_provider,
    read_aws,
    read_azure,
    read_gcp,
)
from potluck.waiting import wait_until

AT = datetime(2026, 1, 2, 8, 22, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("answer", ["", "null", "[]", "{", '{"action": "none"}', "<html>404</html>", "[" * 100_000])
def test_an_answer_that_is_no_notice_is_none(answer: str) -> None:
    assert read_aws(answer) is None
    assert read_gcp(answer, 0.0) is None
    assert read_azure(answer, "vm1") is None


def test_aws_says_when_a_spot_machine_goes() -> None:
    assert read_aws('{"action": "terminate", "time": "2026-01-02T08:22:00Z"}') == Notice("AWS spot", AT)
    assert read_aws('{"action": "stop", "time": "soon"}') == Notice("AWS spot", None)


def test_google_gives_half_a_minute() -> None:
    assert read_gcp("FALSE", 100.0) is None
    assert read_gcp("TRUE\n", 100.0) == Notice("Google Cloud", 130.0)


def azure(kind: str, *names: str, status: str = "Scheduled") -> str:
    event = {"EventType": kind, "Resources": names, "EventStatus": status, "NotBefore": "Fri, 02 Jan 2026 08:22:00 GMT"}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]})


def test_azure_tells_of_all_machines_of_a_set_and_only_this_one_counts() -> None:
    assert read_azure(azure("Preempt", "vm0", "VM1"), "vm1") == Notice("Azure, preempt", AT)
    assert read_azure(azure("Preempt", "vm0"), "vm1") is None
    assert read_azure(azure("Freeze", "vm1"), "vm1") is None
    assert read_azure(azure("Preempt", "vm1", status="Canceled"), "vm1") is None
    assert read_azure(json.dumps({"Events": [1, {"EventType": "Preempt", "Resources": "vm1"}]}), "vm1") is None


def test_a_notice_is_said_in_a_sentence() -> None:
    assert Notice("AWS spot", 220.0).sentence(100.0) == "This machine is taken back in about 2 min 0 s (AWS spot)"
    assert Notice("SIGUSR1", None).sentence(100.0) == "This machine is taken back (SIGUSR1)"


def test_which_cloud_it_is_is_read_from_the_firmware_and_nobody_is_asked() -> None:
    assert decide_provider({"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge"}) == "aws"
    assert decide_provider({"product_name": "Google Compute Engine"}) == "gcp"
    assert decide_provider({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG}) == "azure"
    assert decide_provider({"sys_vendor": "Microsoft Corporation"}) is None  # a laptop, or Hyper-V at home
    assert decide_provider({}) is None


Answer = Callable[[str, str, dict[str, str]], tuple[int, str]]


@contextmanager
def service(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A metadata service on loopback. Yields the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            asked.append(f"{self.command} {self.path}")
            status, text = answer(self.command, self.path, {name.lower(): v for name, v in self.headers.items()})
            self.send_response(status)
            self.send_header("ETag", "a1b2")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _do  # noqa: N815

        def log_message(self, *what: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(ADDRESS, f"127.0.0.1:{server.server_port}")
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def test_aws_is_asked_with_a_token_and_a_raised_risk_is_only_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if method == "PUT":
            return 200, "TOKEN"
        if headers.get("x-aws-ec2-metadata-token") != "TOKEN":
            return 401, ""
        if path.endswith("rebalance"):
            return 200, '{"noticeTime": "2026-01-02T08:20:00Z"}'
        return (200, '{"action": "terminate", "time": "2026-01-02T08:22:00Z"}') if said else (404, "")

    monkeypatch.setitem(PROVIDERS, "aws", (PROVIDERS["aws"][0], 0.01))
    with service(answer, monkeypatch) as asked, closing(NoticeWatch("aws", said.append)) as watch:
        assert wait_until(lambda: watch.notice is not None, 20)
    assert watch.notice == Notice("AWS spot", AT)
    assert said == ["AWS says that this spot machine may soon be taken back. It works until the notice comes."]
    assert asked[0] == "PUT /latest/api/token" and sum(path.startswith("PUT") for path in asked) == 1


def test_google_is_asked_to_answer_when_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, ""
        return 200, "TRUE" if "wait_for_change=true" in path and "last_etag=a1b2" in path else "FALSE"

    with service(answer, monkeypatch), closing(NoticeWatch("gcp", print)) as watch:
        assert wait_until(lambda: watch.notice is not None, 20)
    assert watch.notice is not None and watch.notice.source == "Google Cloud"


def test_azure_is_asked_for_this_machines_name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if headers.get("metadata") != "true":
            return 400, ""
        return 200, "vm1" if "/compute/name" in path else azure("Preempt", "vm1")

    with service(answer, monkeypatch), closing(NoticeWatch("azure", print)) as watch:
        assert wait_until(lambda: watch.notice is not None, 20)
    assert watch.notice == Notice("Azure, preempt", AT)


def test_nobody_is_asked_where_it_was_not_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("potluck.launch.notices.firmware", dict)
    with service(lambda *what: (200, "TRUE"), monkeypatch) as asked:
        for watch in ("off", "auto"):
            with closing(NoticeWatch(watch, said.append)) as found:
                assert found.notice is None
    assert not asked
    assert said == ["The firmware of this machine names no cloud that gives notices; SIGTERM and SIGUSR1 are heard."]
