"""The floor: an empty JSON request on the same HTTP stack and the same kind of socket.

`python -m benchmarks.floor SOCKET`: uvicorn with h11 on asyncio, one Starlette route
that reads a JSON body and answers `{}`; nothing of the engine.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


async def empty(request: Request) -> Response:
    await request.json()
    return JSONResponse({})


def main(path: str) -> None:
    app = Starlette(routes=[Route("/v1/empty", empty, methods=["POST"])])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, proxy_headers=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
