"""Bucket: a place in an object store that speaks S3, through obstore.

Credentials and endpoint come from the environment, under the names that every S3 program knows.
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from potluck.errors import StoreError
from potluck.store.place import CHUNK_BYTES, Exists, Missing, ObjectWriter, Unreachable

WHOLE_BYTES = 1 << 28
"""A larger object travels in pieces of this many bytes: S3 takes at most 5 GB in one request."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REFUSED = re.compile("status code: 40[13]")
_FOR_NOW = re.compile("HTTP error|status code: (5..|408|429)|timed out|SlowDown", re.IGNORECASE)


class Bucket:
    first_pause_s = 0.005
    longest_pause_s = 0.5

    def __init__(self, bucket: str, prefix: str, *, patience_s: float) -> None:
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        plain = endpoint.startswith("http://")
        if plain and not (_is_loopback(endpoint) or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")):
            raise StoreError(
                f"The endpoint {endpoint} is not encrypted, so everybody on the way could read what is trained. Use"
                " https, or set AWS_ALLOW_HTTP=true to do it all the same."
            )
        self._bucket, self._whole_bytes = bucket, WHOLE_BYTES
        self._where = f"s3://{bucket}" + (f" at {endpoint}" if endpoint else "")
        limit = timedelta(seconds=patience_s)
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            endpoint=endpoint or None,
            # The request is signed either way. TLS protects the payload, and a checksum of ours tells of accidents.
            unsigned_payload=not plain or _is_loopback(endpoint),
            client_options={
                "allow_http": plain,
                "timeout": limit,  # else one request that is never answered would outlast our patience
                "connect_timeout": min(limit, timedelta(seconds=10)),  # a server that is away is tried again by then
            },
            retry_config={"max_retries": 0, "retry_timeout": limit},  # we try again ourselves, and can be stopped
        )

    def check(self) -> None:
        self.rooms("")

    def write(self, name: str, writer: ObjectWriter, *, new: bool = False) -> None:
        digest = writer.digest()
        for part in writer.payload:
            digest.update(part)
        parts, limit = [memoryview(writer.head(digest.digest())), *writer.payload], self._whole_bytes
        pieces = [part[at : at + limit] for part in parts for at in range(0, len(part), limit)]
        with self._troubles(name):
            try:
                obstore.put(
                    self._store,
                    name,
                    iter(pieces),
                    mode="create" if new else "overwrite",
                    use_multipart=writer.size > limit,
                    chunk_size=limit,
                )
            except NotSupportedError:
                if not new:
                    raise
                self.write(name, writer)

    @contextmanager
    def read(self, name: str) -> Iterator["_Body"]:
        with self._troubles(name):
            yield _Body(obstore.get(self._store, name))

    def names(self, under: str) -> list[str]:
        with self._troubles(under):
            return [entry["path"] for entries in self._store.list(under) for entry in entries]

    def rooms(self, under: str) -> list[str]:
        with self._troubles(under):
            found = self._store.list_with_delimiter(under or None)["common_prefixes"]
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def delete(self, names: Sequence[str], *, recycle: bool = False) -> None:
        if not names:
            return
        with self._troubles(names[0]):
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise

    def tidy(self, run: str) -> None:
        """A bucket has no folders."""

    @contextmanager
    def _troubles(self, name: str) -> Iterator[None]:
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise Exists from None
        except (BaseError, OSError) as error:
            raise self._translated(error, name) from None

    def _translated(self, error: Exception, name: str) -> Exception:
        text = str(error)
        if "NoSuchBucket" in text:
            return StoreError(f"There is no bucket {self._bucket!r} ({self._where}). Make it, or name another.")
        if isinstance(error, FileNotFoundError):
            return Missing(name)
        if "/latest/" in text:  # it asked the machine for credentials, for want of any others
            return StoreError("There are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or _REFUSED.search(text):
            return StoreError(
                f"{self._where} does not let us in ({_code(text)}). Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"
                " AWS_REGION, and that they may read, write, list and delete there."
            )
        reason = _reason(text)
        if _FOR_NOW.search(text):
            return Unreachable(reason)
        return StoreError(f"{self._where} refused: {reason}.")


class _Body:
    """Copies what comes from the network once: to where it belongs."""

    def __init__(self, result: "obstore.GetResult") -> None:
        self.size = result.meta["size"]
        self._chunks = iter(result.stream(min_chunk_size=CHUNK_BYTES))
        self._rest = memoryview(b"")

    def fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            if not len(self._rest):
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._rest = memoryview(chunk)
            count = min(len(self._rest), len(view) - done)
            view[done : done + count] = self._rest[:count]
            self._rest = self._rest[count:]
            done += count
        return done


def _code(text: str) -> str:
    found = re.search("<Code>([A-Za-z]{1,60})</Code>", text)
    return found[1] if found else "permission denied"


def _reason(text: str) -> str:
    """The end of the first line, where obstore says what it came to, without what it asked for."""
    return text.partition("\n")[0].rpartition(" - ")[2].partition(": <?xml")[0].strip()[:200]


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
