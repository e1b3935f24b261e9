"""The page's process, as a browser and a stranger meet it: what it serves, to whom, and that no run fails for it."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from potluck.account import PROCESS, processes_folder
from potluck.errors import ConfigError
from potluck.fleet.invite import Identity, client_context
from potluck.page.access import Access, can_tell_owners, owner_of
from potluck.page.start import PageProcess, fingerprint_of, start_page
from potluck.page.where import PageSettings, page_address
from potluck.show.output import OutputFile, OutputLine
from potluck.system import started_at
from potluck.waiting import wait_until
from tests.unit.test_page_fold import START, started, step

STATIC = Path(__file__).parents[2] / "src" / "potluck" / "page" / "static"
HERE = Access()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "invite").write_text("potluck://127.0.0.1:1/secret.pin\n")
    append(folder, started(), step(1), step(2))
    return folder


@pytest.fixture(scope="module")
def orders() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def page(run: Path, orders: list[dict[str, Any]]) -> Iterator[PageProcess]:
    wanted = PageSettings(folder=run, invite=run / "invite", identity=run / "identity")
    with paged(wanted, on_order=orders.append) as process:
        yield process


@contextmanager
def paged(wanted: PageSettings, address: Access = HERE, **more: Any) -> Iterator[PageProcess]:
    process = start_page(address, wanted, **more)
    assert process is not None
    try:
        yield process
    finally:
        process.end()
        process.process.wait(60)  # close() kills one that a busy machine gives no time to end by itself
        process.close()


def append(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def ask(
    port: int, path: str = "/", method: str = "GET", body: str = "", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body or None, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


@contextmanager
def stream(port: int) -> Iterator[Iterator[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
    lines = iter(answer.readline, b"")
    try:
        yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
    finally:
        connection.close()


def test_the_page_is_small_names_nobody_else_and_lets_nothing_else_in(page: PageProcess) -> None:
    port, size = page.settings.port, 0
    for path, kind in {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}.items():
        status, text, headers = ask(port, path)
        size += len(text.encode())
        assert status == 200 and headers["Content-Type"].startswith(kind)
        assert headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert not re.search(r"https?://(?!www\.w3\.org)", text)
        assert "style=" not in text and "onclick" not in text  # the policy would refuse them
    assert size < 100_000
    assert page.settings.link == f"http://127.0.0.1:{port}/"


def test_what_is_new_in_the_folder_reaches_whoever_looks(page: PageProcess, run: Path) -> None:
    with stream(page.settings.port) as told:
        first = next(told)
        while not first.get("head", {}).get("step"):  # it may have been quicker than the first look at the file
            first |= next(told)
        assert first["run"]["name"] == "a" and len(first["series"]["points"]) == 2
        append(run, step(3))
        news = next(message for message in told if "series" in message)
        assert news["series"]["start"] == 1 and news["series"]["points"][-1][9] == 3
        assert "run" not in news and "looks" not in news


def test_a_run_beside_is_told_with_its_curves_and_nothing_that_it_did(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        append(folder, started(name=folder.name), step(1))
    (second / "run.toml").write_text("epochs = 3")
    wanted = PageSettings(folder=first, beside=second, keeps_place=False)
    with paged(wanted) as page, stream(page.settings.port) as told:
        other: dict[str, Any] = {}
        while not other.get("series"):
            other |= next(told).get("other", {})
        assert other["run"]["name"] == "second" and other["recipe"] == {"epochs": "3"}
        append(second, step(2))
        news = next(message["other"] for message in told if "other" in message)
        assert news["series"]["points"][-1][9] == 2 and news["head"]["step"] == 2
        assert {*other, *news} == {"reset", "run", "head", "looks", "series", "recipe"}


def test_what_a_script_prints_reaches_whoever_looks(tmp_path: Path) -> None:
    append(tmp_path, started())
    output = OutputFile(tmp_path)
    output.write(OutputLine(START, "host-worker-0", "<b>epoch 1</b>"))
    with paged(PageSettings(folder=tmp_path, keeps_place=False)) as page, stream(page.settings.port) as told:
        assert next(message["output"] for message in told if "output" in message) == [
            [1, START, "host-worker-0", "<b>epoch 1</b>"]
        ]
        output.write(OutputLine(START + 1, "host-worker-0", "epoch 2"))
        assert next(message["output"] for message in told if "output" in message)[0][0] == 2
    output.close()


@pytest.mark.slow
def test_what_a_rank_of_a_group_uses_is_measured_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    append(run, started(), step(1))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        folder = processes_folder() / str(rank.pid)
        folder.mkdir(parents=True)
        assert wait_until(lambda: bool(started_at(rank.pid)), 10)
        facts = {"pid": rank.pid, "started": started_at(rank.pid), "role": "worker", "name": "1", "run": str(run)}
        (folder / PROCESS).write_text(json.dumps(facts))
        with paged(PageSettings(folder=run, keeps_place=False)) as page, stream(page.settings.port) as told:
            rows = (message["workers"]["changed"] for message in told if "workers" in message)
            used = next(changed["1"][14] for changed in rows if changed.get("1", [None] * 15)[14])
            assert [part[0] for part in used] == ["processor", "memory"]


def test_prometheus_gets_its_figures(page: PageProcess) -> None:
    def figures() -> dict[str, str]:
        status, text, headers = ask(page.settings.port, "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    assert wait_until(lambda: int(figures().get("potluck_steps_total", 0)) >= 2, 10.0)
    assert figures()['potluck_worker_busy_ratio{worker="0",name="w0"}'] == "0.5"


def test_a_name_that_leads_here_from_elsewhere_is_refused(page: PageProcess) -> None:
    port = page.settings.port
    for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert ask(port, Host=name)[0] == 403
    for name in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(port, Host=name)[0] == 200


def test_whoever_asks_does_not_say_who_that_is(page: PageProcess) -> None:
    """Another user of the machine could name the connection of a browser that may look."""
    for said in ("127.0.0.1:1", "10.0.0.1"):
        assert ask(page.settings.port, X_Forwarded_For=said)[0] == 200  # it is we who ask, whatever is said


def test_what_is_no_request_leaves_nothing_behind(page: PageProcess) -> None:
    with socket.create_connection(("127.0.0.1", page.settings.port), timeout=20) as stranger:
        stranger.sendall(b"\x00\x01\r\n\r\n")
        assert b"400" in stranger.recv(4096)
    assert os.fstat(page._complaints.fileno()).st_size == 0


HALVES = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "half a body": b"POST /order HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000000\r\n\r\n",
    "a second half": b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\nGET / HT",
}


@pytest.mark.parametrize("half", ["half a head", "half a body"])
def test_those_who_send_half_a_request_do_not_keep_the_owner_out(page: PageProcess, half: str) -> None:
    port = page.settings.port
    with ExitStack() as stack, stream(port) as seen:
        next(seen)
        for _ in range(270):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            stranger.sendall(HALVES[half])
        for _ in range(3):
            assert ask(port)[0] == 200
        next(seen)  # a page that is open stays so


@pytest.mark.parametrize("half", HALVES)
def test_what_is_no_whole_request_in_time_is_closed(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn
    from starlette.applications import Starlette

    from potluck.page import serve as connections

    monkeypatch.setattr(connections, "HEAD_S", 0.05)

    async def visit() -> None:
        config = uvicorn.Config(Starlette(), http=connections.PageConnection, log_config=None, timeout_keep_alive=600)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            heard, said = await asyncio.open_connection(*listener.getsockname())
            said.write(HALVES[half])
            await asyncio.wait_for(heard.read(), 20)
            said.close()
            server.should_exit = True
            await serving

    with suppress(ConnectionResetError):
        asyncio.run(visit())


def test_the_line_to_join_is_shown_to_the_page_itself_when_asked_for(page: PageProcess) -> None:
    port = page.settings.port
    assert ask(port, "/invite")[0] == 405
    assert ask(port, "/invite", "POST")[0] == 403
    assert ask(port, "/invite", "POST", Origin="http://evil.example")[0] == 403
    assert ask(port, "/invite", "POST", Origin=f"http://127.0.0.1:{port}")[:2] == (
        200,
        "potluck join potluck://127.0.0.1:1/secret.pin",
    )


def test_an_order_needs_the_pages_own_token_and_origin(page: PageProcess, orders: list[dict[str, Any]]) -> None:
    port = page.settings.port
    with stream(port) as told:
        token = next(told)["can"]["order"]
    origin, let_go = f"http://127.0.0.1:{port}", json.dumps({"action": "let_go", "worker": 7})
    assert ask(port, "/order", "POST", let_go, Origin=origin)[0] == 403
    assert ask(port, "/order", "POST", let_go, X_Potluck_Order="x", Origin=origin)[0] == 403
    assert ask(port, "/order", "POST", let_go, X_Potluck_Order=token)[0] == 403
    assert ask(port, "/order", "POST", let_go, X_Potluck_Order=token, Origin="http://evil.example")[0] == 403
    for odd in ("", "[]", '{"action": "rm"}', '{"action": "let_go"}', '{"action": "pause", "worker": 1}', "x" * 5000):
        assert ask(port, "/order", "POST", odd, X_Potluck_Order=token, Origin=origin)[0] == 400
    assert orders == []
    assert ask(port, "/order", "POST", let_go, X_Potluck_Order=token, Origin=origin)[0] == 202
    assert ask(port, "/order", "POST", '{"action": "pause"}', X_Potluck_Order=token, Origin=origin)[0] == 202
    assert wait_until(lambda: len(orders) == 2, 10.0)
    assert orders == [{"action": "let_go", "worker": 7}, {"action": "pause", "worker": None}]


def test_a_page_that_only_shows_takes_no_orders_and_is_there_again_at_its_port(tmp_path: Path) -> None:
    append(tmp_path, started())
    with paged(PageSettings(folder=tmp_path)) as page:
        port = page.settings.port
        with stream(port) as told:
            assert next(told)["can"] == {"order": None, "invite": False, "led": False}
        assert ask(port, "/order", "POST", '{"action": "pause"}', Origin=f"http://127.0.0.1:{port}")[0] == 403
        assert wait_until((tmp_path / "page.json").exists, 10.0)
        assert (tmp_path / "page.json").stat().st_mode & 0o777 == 0o600
    assert page.process.returncode == 0
    with paged(PageSettings(folder=tmp_path)) as again:
        assert again.settings.port == port


@pytest.mark.skipif(not can_tell_owners(), reason="this system does not tell whose process a connection is")
def test_the_system_tells_whose_process_is_at_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = listener.getsockname()
        with socket.create_connection(own) as near:
            assert owner_of(near.getsockname(), own) == os.getuid()
            assert owner_of(("127.0.0.1", 1), own) is None
    access = Access("127.0.0.1", 1, "")
    ends = ("127.0.0.1", 1), ("127.0.0.1", 1)
    assert access.refusal({"host": "127.0.0.1:1"}, {}, ends) == "This page is for the user who started it."


@pytest.mark.skipif(not can_tell_owners(), reason="this system does not tell whose process a connection is")
def test_a_connection_that_nobody_holds_any_more_speaks_for_nobody() -> None:
    """It is listed as root's: another user could leave one behind at a port, and come again from there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = listener.getsockname()
        near = socket.create_connection(own)
        end = near.getsockname()
        with listener.accept()[0]:
            near.close()
            assert owner_of(end, own) is None
        with socket.create_connection(own) as near:
            assert owner_of(near.getsockname(), ("127.0.0.2", own[1])) is None


def test_a_token_is_taken_from_the_link_from_the_cookie_and_from_a_scraper_and_from_nowhere_else() -> None:
    access = Access("0.0.0.0", 8080, "right", encrypted=True)
    named = {"host": "10.0.0.5:8080"}
    assert access.refusal(named, {"token": "right"}, None) == ""
    assert access.refusal(named | {"cookie": "a=b; potluck-8080=right"}, {}, None) == ""
    assert access.refusal(named | {"authorization": "Bearer right"}, {}, None) == ""
    for headers, query in (({}, {}), ({"cookie": "potluck-8080=wrong"}, {}), ({"cookie": "\x00"}, {"token": "righ"})):
        assert "needs the token" in access.refusal(named | headers, query, (("127.0.0.1", 5), ("127.0.0.1", 8080)))
    assert "does not have that name" in access.refusal({"host": "evil.example"}, {"token": "right"}, None)


def test_a_page_for_others_is_encrypted_with_the_runs_certificate_and_keeps_its_token(tmp_path: Path) -> None:
    """At a loopback address here, where no other machine reaches it."""
    append(tmp_path, started())
    identity = Identity.load_or_make(tmp_path / "identity")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = PageSettings(
            host="127.0.0.1",
            port=port,
            token="right",
            encrypted=True,
            descriptor=listener.fileno(),
            folder=tmp_path,
            identity=identity.folder,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "potluck.page.serve"], stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
        )
        assert process.stdin is not None
        process.stdin.write(settings.line().encode())
        process.stdin.flush()
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=client_context())
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        shown = ssl.DER_cert_to_PEM_cert(connection.sock.getpeercert(binary_form=True) or b"")
        assert shown.split() == (identity.folder / "cert.pem").read_text().split() and fingerprint_of(identity.folder)
        connection.request("GET", "/")
        refused = connection.getresponse()
        assert refused.status == 403 and b"token" in refused.read()
        connection.request("GET", "/?token=right")
        answer = connection.getresponse()
        cookie = answer.headers["Set-Cookie"]
        assert answer.status == 200 and answer.read()
        assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Secure"))
        connection.request("GET", "/metrics", headers={"Cookie": cookie.split(";")[0]})
        assert connection.getresponse().status == 200
        connection.close()
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_port_that_is_taken_is_a_sentence_and_no_failure(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start_page(Access("127.0.0.1", port), PageSettings(folder=tmp_path)) is None
    assert f"There is no page: it cannot be served at 127.0.0.1 port {port}" in capfd.readouterr().err


def test_a_page_that_dies_is_a_sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with paged(PageSettings(folder=tmp_path)) as page:
        page.process.send_signal(signal.SIGKILL)
        told: list[str] = []
        assert wait_until(lambda: "The page has ended" in "".join([*told, *_more(told, capfd)]), 10.0)


def _more(told: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    told.append(capfd.readouterr().err)
    return told


def test_what_page_says_is_understood_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_PAGE", raising=False)
    assert page_address(None) == page_address("on") == Access("127.0.0.1", 0)
    assert page_address("off") is None
    assert page_address("8080") == Access("127.0.0.1", 8080)
    assert page_address("0.0.0.0:8080") == Access("0.0.0.0", 8080)
    assert page_address("[::1]:80") == Access("::1", 80)
    for odd in ("x", "1.2.3.4", "1.2.3.4:99999", "a:b"):
        with pytest.raises(ConfigError, match="--page is off, a port, or ADDRESS:PORT"):
            page_address(odd)
    monkeypatch.setenv("POTLUCK_PAGE", "off")
    assert page_address(None) is None


def test_a_line_that_is_being_written_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    from potluck.page.reader import RunReader

    reader, line = RunReader(tmp_path), json.dumps(step(1)) + "\n"
    assert not reader.read_on()
    (tmp_path / "events.jsonl").write_text(json.dumps(started()) + "\n" + line[:40])
    reader.read_on()
    assert reader.fold.run and not reader.fold.last
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[40:] + "no json\n")
    reader.read_on()
    assert reader.fold.last["step"] == 1 and reader.fold.first_at == START
    (tmp_path / "events.jsonl").unlink()
    append(tmp_path, started(name="another"))
    while reader.read_on() or reader.fold.run.get("name") != "another":
        pass
    assert not reader.fold.last and reader.number == 1
    reader.close()
