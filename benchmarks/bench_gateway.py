"""Programs that read through the gateway, against the same requests straight from this host."""

from __future__ import annotations

import http.client
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.bench_daemon import run_daemon
from benchmarks.line import Line
from fumehood.client import Client

REQUESTS = 300
SIZE_MB = 50
CONNECTIONS = 200
BODY = b'{"answer": 42}'

SETTINGS = {
    "FUMEHOOD_GATEWAY__HOSTS": '["localhost"]',
    "FUMEHOOD_GATEWAY__ALLOWED_HOSTS": '["localhost"]',
}
ENV = [{"name": name, "value": ""} for name in ("NO_PROXY", "no_proxy")]
"""Otherwise clients do not ask a proxy for this name."""

MEASURE = f"""
import http.client, os, statistics, time, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
client = http.client.HTTPConnection(proxy.hostname, proxy.port)
taken = []
for _ in range({REQUESTS}):
    begun = time.perf_counter()
    client.request("GET", "http://localhost:PORT/small", headers={{"Host": "localhost:PORT"}})
    client.getresponse().read()
    taken.append(time.perf_counter() - begun)
statistics.median(taken)
"""

LARGE = """
import time, urllib.request
begun = time.perf_counter()
with urllib.request.urlopen("http://localhost:PORT/large") as answer:
    size = sum(len(piece) for piece in iter(lambda: answer.read(1 << 20), b""))
size / (time.perf_counter() - begun) / (1 << 20)
"""

MANY = f"""
import socket, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
clients = [socket.create_connection((proxy.hostname, proxy.port)) for _ in range({CONNECTIONS})]
for client in clients:
    client.sendall(b"GET http://localhost:PORT/small HTTP/1.1\\r\\nHost: localhost:PORT\\r\\n"
                   b"Connection: close\\r\\n\\r\\n")
answers = [b"".join(iter(lambda: client.recv(65536), b"")) for client in clients]
sum(b" 200 " in answer and b"42" in answer for answer in answers)
"""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # so that head and body are one packet

    def do_GET(self) -> None:
        large = self.path == "/large"
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE_MB << 20 if large else len(BODY)))
        self.end_headers()
        for _ in range(SIZE_MB if large else 0):
            self.wfile.write(bytes(1 << 20))
        if not large:
            self.wfile.write(BODY)

    def log_message(self, *words: object) -> None: ...


class _Server(ThreadingHTTPServer):
    request_queue_size = 2 * CONNECTIONS


@contextmanager
def _serving() -> Iterator[int]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def gateway_lines() -> Iterator[Line]:
    """Every target of the gateway."""
    with run_daemon(SETTINGS) as daemon, _serving() as port, Client(daemon.socket) as client:

        def run(code: str) -> float:
            arguments = {"code": code.replace("PORT", str(port)), "env": ENV}
            answer = client.call("run_python", arguments, network=["localhost"])
            if not answer.success:
                raise RuntimeError(answer.error)
            return float(answer.data["value"])

        run("0")
        inside_ms, straight_ms = run(MEASURE) * 1e3, _straight_ms(port)
        more_ms = inside_ms - straight_ms
        yield Line(
            "a request through the gateway: more than straight from the host, kept connection",
            "≤ 2 ms", f"{more_ms:.2f} ms ({inside_ms:.2f} / {straight_ms:.2f} ms)", more_ms <= 2,
        )  # fmt: skip
        speed = run(LARGE)
        yield Line(
            f"{SIZE_MB} MB through the gateway", "≥ 20 MB/s", f"{speed:.0f} MB/s", speed >= 20
        )
        served = int(run(MANY))
        yield Line(
            f"{CONNECTIONS} connections of one program at once", "none lost",
            f"{served} served", served == CONNECTIONS,
        )  # fmt: skip


def _straight_ms(port: int) -> float:
    client = http.client.HTTPConnection("localhost", port)
    taken = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        client.request("GET", "/small")
        client.getresponse().read()
        taken.append(time.perf_counter() - begun)
    client.close()
    return statistics.median(taken) * 1e3
