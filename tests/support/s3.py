"""An object store with the interface of S3, on loopback."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer


class S3:
    """A server that can go away and come back, with what it had."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.variables = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }
        self.start()
        self.client: Any = boto3.client(
            "s3", endpoint_url=self.variables["AWS_ENDPOINT_URL"], region_name="us-east-1",
            aws_access_key_id="key", aws_secret_access_key="secret",
        )  # fmt: skip

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def put(self, bucket: str, **objects: bytes) -> None:
        for key, content in objects.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def keys(self, bucket: str) -> set[str]:
        listed = self.client.list_objects_v2(Bucket=bucket)
        return {one["Key"] for one in listed.get("Contents", [])}


@contextmanager
def running_s3() -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3()
    try:
        yield server
    finally:
        server.client.close()
        server.stop()


@contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
