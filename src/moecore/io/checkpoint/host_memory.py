"""Checkpoints in the memory of hosts: hostmemory:// URLs, each file on more than one host.

Each host has a process that stores files in memory (`memory_server.py`) and outlives the ranks. A
rank's shard file is stored on the rank's host and on the next hosts in a ring, in which neighbours
are in different failure domains. A small file, such as a manifest, is stored on all hosts. If a
host is lost, copies of its files remain.

The files are in shared memory, not in pinned memory: a pinned buffer belongs to one process, and
these files outlive the ranks. `Saver` copies GPU tensors to the host before a file is written.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.spec import AbstractFileSystem

from moecore.base.failures import run_and_share_errors, share_call_errors, share_errors
from moecore.base.fields import Count, check_arguments
from moecore.base.rank_checks import gather_objects
from moecore.io.checkpoint import memory_server
from moecore.io.checkpoint.directory import latest
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.checkpoint.object_storage import AnyPath

SCHEME = "hostmemory"
HOST_VARIABLE = "MOECORE_HOST"  # its name, where one machine stands for several hosts
DOMAIN_VARIABLE = "MOECORE_DOMAIN"  # of hosts that may fail together, such as a rack
IDLE_SECONDS = 12 * 3600.0
FINAL = ".safetensors"  # files of ranks, which have a new name in each save and never change
START_SECONDS = 20.0  # for a server to start
REQUEST_SECONDS = 60.0  # for an answer


@dataclass(frozen=True, slots=True)
class _Host:
    """A host's name and the address of its server."""

    name: str
    ip: str
    port: int

    def request(
        self, method: str, name: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPMessage, bytes]:
        """Send a request; return headers and body. FileNotFoundError or OSError for a failure."""
        connection = http.client.HTTPConnection(self.ip, self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request(method, name, body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"host {self.name} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(name)
        if answer.status != 200:
            raise OSError(f"host {self.name}: {data.decode(errors='replace')}")
        return answer.headers, data


@dataclass(frozen=True, slots=True)
class _Hosts:
    """All hosts, this host first and then in the order of a ring."""

    ring: tuple[_Host, ...]
    num_copies: int

    def ask_all(
        self, method: str, name: str, headers: dict[str, str] | None = None
    ) -> Iterator[tuple[_Host, Any, bytes]]:
        """Yield (host, headers, body) of hosts that have the file; OSError if no host answered."""
        failures = list[OSError]()
        for host in self.ring:
            try:
                yield host, *host.request(method, name, headers=headers)
            except FileNotFoundError:
                pass
            except OSError as error:
                failures.append(error)
        if len(failures) == len(self.ring):
            raise failures[0]

    def find(self, name: str) -> tuple[_Host, int]:
        """Return a host with the newest version of a file, and the size in bytes.

        Files of ranks have a new name in each save, so any of their copies is the newest.
        """
        copies = list[tuple[int, _Host, int]]()
        for host, headers, _ in self.ask_all("HEAD", name):
            copies.append((int(headers["X-Version"]), host, int(headers["X-Size"])))
            if name.endswith(FINAL):
                break
        if not copies:
            raise FileNotFoundError(name)
        _, host, size = max(copies, key=lambda item: item[0])
        return host, size


class _Upload:
    """A file that appears on several hosts at `close`."""

    def __init__(self, hosts: Sequence[_Host], name: str) -> None:
        self.closed = False
        self._hosts, self._name = hosts, name
        self._url = f"{name}?upload={uuid.uuid4().hex}"

    def write(self, data: Any) -> None:
        """Append bytes on each host."""
        for host in self._hosts:
            host.request("PUT", self._url, data, {"Content-Length": str(len(data))})

    def close(self) -> None:
        """Make the file visible."""
        self.write(b"")
        for host in self._hosts:
            host.request("POST", self._url)
        self.closed = True

    def discard(self) -> None:
        """Delete what has been written."""
        for host in self._hosts:
            with suppress(OSError):
                host.request("DELETE", self._url)


_hosts: _Hosts | None = None


def _get_hosts() -> _Hosts:
    """Return the hosts of the last `connect_host_memory`."""
    if _hosts is None:
        raise ValueError(f"{SCHEME}:// needs its hosts: call connect_host_memory() before")
    return _hosts


class HostMemoryFileSystem(AbstractFileSystem):
    """An fsspec file system in the memory of hosts, for `RemotePath`; a path is JOB/FILE."""

    protocol = SCHEME

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size in bytes and type of a file."""
        return {"name": path, "size": _get_hosts().find(quote(f"/{path}"))[1], "type": "file"}

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[str]:
        """Return the paths directly below a prefix."""
        answers = _get_hosts().ask_all("GET", f"{quote(f'/{path}')}?list")
        names = {name for *_, body in answers for name in body.decode().split("\n") if name}
        return [f"{path}/{name}" for name in sorted(names)]

    def cat_file(self, path: str, start: int, end: int, **_: Any) -> bytes:
        """Return the bytes `start` to `end` (exclusive) of a file."""
        name, hosts = quote(f"/{path}"), _get_hosts()
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if not name.endswith(FINAL):
            return hosts.find(name)[0].request("GET", name, headers=headers)[1]
        for answer in hosts.ask_all("GET", name, headers):  # of the first host that has the file
            return answer[2]
        raise FileNotFoundError(path)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        """Write a file to all hosts."""
        upload = _Upload(_get_hosts().ring, quote(f"/{path}"))
        upload.write(value)
        upload.close()

    def open(self, path: str, mode: str, **_: Any) -> _Upload:
        """Return a writer that uploads a file to this host and the next `num_copies` - 1 hosts."""
        assert mode == "wb", "ranges are read by cat_file"
        hosts = _get_hosts()
        return _Upload(hosts.ring[: hosts.num_copies], quote(f"/{path}"))

    def rm_file(self, path: str, **_: Any) -> None:
        """Delete a file, or all files below a prefix, on all hosts."""
        for _host in _get_hosts().ask_all("DELETE", quote(f"/{path}")):
            pass

    rm = rm_file


fsspec.register_implementation(SCHEME, HostMemoryFileSystem, clobber=True)


@share_call_errors
def connect_host_memory(num_copies: Count = 2) -> None:
    """Start or find each host's memory server, for checkpoint URLs hostmemory://JOB. Collective.

    `save`, `Saver`, `load`, `latest` and the other checkpoint functions accept these URLs after
    this call. A server outlives the ranks, so the ranks of a restarted job find its files. A server
    deletes its files and ends after 12 hours without a request.

    Args:
        num_copies: number of hosts that store each file: the host of the rank that wrote the file,
            and the next hosts of the ring. With 2, no file is lost if one host fails, or several
            hosts fail and no two are neighbours in the ring. The ring alternates between failure
            domains, which the environment variable MOECORE_DOMAIN names on each host. Without this
            variable, each host is its own domain.

    Raises:
        OSError: if a server does not start.
    """
    global _hosts
    with share_errors():
        check_arguments(connect_host_memory, locals())
    name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    ip = _find_own_ip()
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    host = run_and_share_errors(lambda: _start_server(name, ip) if is_first else None)
    domain = os.environ.get(DOMAIN_VARIABLE) or name
    by_name = {host.name: (host, d) for host, d in gather_objects((host, domain)) if host}
    if name not in by_name:
        raise OSError(f"host {name} has no rank with LOCAL_RANK 0: start the ranks by torchrun")
    names = alternate_domains({name: domain for name, (_, domain) in by_name.items()})
    place = names.index(name)
    ring = tuple(by_name[n][0] for n in names[place:] + names[:place])
    _hosts = _Hosts(ring, num_copies)


def alternate_domains(domains: Mapping[str, str]) -> list[str]:
    """Return the keys, names of hosts, in an order that alternates between their values.

    Example: {"a": "x", "b": "x", "c": "y", "d": "y"} -> ["a", "c", "b", "d"]
    """
    numbers, places = Counter[str](), list[tuple[int, str, str]]()
    for name, domain in sorted(domains.items()):
        places.append((numbers[domain], domain, name))
        numbers[domain] += 1
    return [name for *_, name in sorted(places)]


def find_complete(root: AnyPath) -> AnyPath | None:
    """Return the latest checkpoint of `root` if all its files exist, otherwise None."""
    path = latest(root)
    if path is None:
        return None
    files = read_manifest(path).files
    return path if all((path / name).is_file() for name in files) else None


def _find_own_ip() -> str:
    """Return the address of this host in the network of the job's rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        return str(probe.getsockname()[0])


def _start_server(name: str, ip: str) -> _Host:
    """Return this host with the address of its server, which is started unless it answers."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else Path(tempfile.gettempdir())
    folder = base / f"moecore-{os.getuid()}-{quote(name, safe='')}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} must be a directory of this user: remove it")
    port_file = folder / f".port-{ip}"
    end, is_started = time.monotonic() + START_SECONDS, False
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            host = _Host(name, ip, int(port_file.read_text()))
            with suppress(FileNotFoundError):
                host.request("GET", "/-?list")
            return host
        if not is_started:
            port_file.unlink(missing_ok=True)
            subprocess.Popen(
                [sys.executable, "-I", memory_server.__file__, folder, ip, str(IDLE_SECONDS)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the launcher ends the sessions of its ranks
            )
            is_started = True
        time.sleep(0.02)
    raise OSError(f"the memory server of host {name} did not start: is {base} full?")
