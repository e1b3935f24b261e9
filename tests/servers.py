"""S3 servers on loopback, for tests: rclone's checks signatures, moto's knows conditional requests."""

import logging
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "potluck-test"
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something", "AWS_REGION": "us-east-1"}
_READY = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Rclone:
    """Serves a folder; its buckets are the folders in it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        program = Path(sys.executable).with_name("rclone")
        keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
        self._process = subprocess.Popen(
            [program, "serve", "s3", f"--auth-key={keys}", f"--addr=127.0.0.1:{port}", "--config=", str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if found := _READY.search(line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("rclone did not start: " + "".join(said))

    @property
    def env(self) -> dict[str, str]:
        return KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextmanager
def rclone(folder: Path) -> Iterator[Rclone]:
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    server = Rclone(folder)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def moto() -> Iterator[dict[str, str]]:
    """The environment for it; it runs in this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
        yield KEYS | {"AWS_ENDPOINT_URL": url}
    finally:
        server.stop()
