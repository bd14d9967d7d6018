"""An image registry with one image on loopback, for builds from a named base."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import docker

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


@contextmanager
def serving(client: docker.APIClient, image: str) -> Iterator[str]:
    """Serve the image and yield its reference by digest."""
    manifest, blobs = _taken_apart(b"".join(client.get_image(image)))
    digest = _digest(manifest)
    answers = {f"/blobs/{name}": content for name, content in blobs.items()}
    answers[f"/manifests/{digest}"] = manifest

    class Registry(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = next((a for end, a in answers.items() if self.path.endswith(end)), None)
            content = b"{}" if self.path == "/v2/" else found
            self.send_response(200 if content is not None else 404)
            self.send_header("content-type", MANIFEST if content is manifest else "text/plain")
            self.send_header("content-length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}/base@{digest}"
        finally:
            server.shutdown()
            thread.join(10)


def _taken_apart(saved: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Split an image into a manifest and its blobs."""
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(name)
            return file.read()

        (entry,) = json.loads(read("manifest.json"))
        config, layers = read(entry["Config"]), [read(name) for name in entry["Layers"]]
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST, "config": _described(CONFIG, config),
        "layers": [_described(LAYER, layer) for layer in layers],
    }  # fmt: skip
    return json.dumps(manifest).encode(), {_digest(blob): blob for blob in (config, *layers)}


def _described(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
