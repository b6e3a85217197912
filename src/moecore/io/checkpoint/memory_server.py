"""A process that stores files in the memory of one host, and outlives the ranks that write them.

    python -I memory_server.py FOLDER IP IDLE_SECONDS

The process writes its port to the file `FOLDER/.port-IP`. FOLDER is on a file system in memory,
such as /dev/shm. The process ends, and deletes FOLDER, after `IDLE_SECONDS` without a request. This
file imports only the standard library, so the process starts in milliseconds.

Requests, for a name with slashes:
    PUT /NAME?upload=ID      append the body to the upload ID of this name
    POST /NAME?upload=ID     complete the upload: NAME appears, or is replaced
    DELETE /NAME?upload=ID   abort the upload
    DELETE /NAME             delete a file, or all files below a prefix
    HEAD /NAME               size, and time of completion in ns (header X-Version)
    GET /NAME                the file; `Range: bytes=a-b` for a part of it
    GET /NAME?list           names directly below a prefix, one per line, prefixes with a slash
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 4 * 2**20  # of one read from a socket


class MemoryServer(ThreadingHTTPServer):
    """HTTP server that stores files of a folder in the memory of one host."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, ip: str) -> None:
        super().__init__((ip, 0), Handler)
        self.folder = folder
        self.last_request = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    """Answers one HTTP request of a client of `MemoryServer`."""

    server: MemoryServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Append the body to an upload."""
        upload, length = self._get_upload_path(), int(self.headers["Content-Length"])
        upload.parent.mkdir(parents=True, exist_ok=True)
        with open(upload, "ab", buffering=0) as file:
            while length:
                data = self.rfile.read(min(length, PIECE_BYTES))
                if not data:
                    return  # the client has died; nothing of its upload is ever visible
                file.write(data)
                length -= len(data)
        self._answer(200)

    def do_POST(self) -> None:
        """Complete an upload."""
        os.replace(self._get_upload_path(), self._get_path())
        self._answer(200)

    def do_DELETE(self) -> None:
        """Delete a file, all files below a prefix, or an upload."""
        path = self._get_upload_path() if self._get_query() else self._get_path()
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._answer(200)

    def do_HEAD(self) -> None:
        """Answer with size and version."""
        stat = os.stat(self._get_path())
        self._answer(200, {"X-Size": stat.st_size, "X-Version": stat.st_mtime_ns})

    def do_GET(self) -> None:
        """Answer with a list, a file or a part of a file."""
        path = self._get_path()
        if self._get_query() == "list":
            entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
            lines = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
            self._answer(200, body="\n".join(sorted(lines)).encode())
            return
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, _, last = (
                self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            )
            begin, end = int(first), min(size, int(last) + 1) if last else size
            length = max(0, end - begin)
            self._send_head(200, {"Content-Length": length})
            self.wfile.flush()
            while length > 0:
                count = os.sendfile(self.connection.fileno(), file.fileno(), begin, length)
                begin, length = begin + count, length - count

    def handle_one_request(self) -> None:
        """Answer a request; errors of the file system become status codes."""
        self.server.last_request = time.monotonic()
        try:
            super().handle_one_request()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._answer(404)
        except ConnectionError:
            self.close_connection = True
        except (OSError, ValueError) as error:
            self._answer(507, body=str(error).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(
        self, code: int, headers: dict[str, object] | None = None, body: bytes = b""
    ) -> None:
        """Send a whole response; after an error the connection ends, because a body may wait."""
        if code >= 400:
            self.close_connection = True
            headers = {"Connection": "close"}
        self._send_head(code, {"Content-Length": len(body), **(headers or {})})
        self.wfile.write(body)

    def _send_head(self, code: int, headers: dict[str, object]) -> None:
        """Send the status and the headers."""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def _get_query(self) -> str:
        """Return the query of the URL."""
        return urlsplit(self.path).query

    def _get_path(self) -> Path:
        """Return the path of the request's file; ValueError if it is not below the folder."""
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError("not a name")
        return self.server.folder.joinpath(*parts)

    def _get_upload_path(self) -> Path:
        """Return the path of the request's upload, a hidden file in its target's folder."""
        path, upload = self._get_path(), self._get_query().removeprefix("upload=")
        if not upload.isalnum():
            raise ValueError("not an upload")
        return path.with_name(f".{path.name}-{upload}")


def serve(folder: Path, ip: str, idle_seconds: float) -> None:
    """Serve a folder until no request has arrived for `idle_seconds`, then delete the folder.

    The server also ends if a newer server of this folder has started, or the folder is deleted.
    """
    server = MemoryServer(folder, ip)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, port_file = str(server.server_port), folder / f".port-{ip}"
    draft = folder / f".port-{ip}-{os.getpid()}"
    draft.write_text(port)
    draft.replace(port_file)
    while port_file.exists() and port_file.read_text() == port:
        if time.monotonic() - server.last_request > idle_seconds:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
