"""The process between an engine and Ray.

Ray ends the process that it runs in if the cluster's head is unreachable for a minute. So Ray runs
in this separate process, which the engine restarts. The process receives requests on a socket,
which is its standard input, and sends the answers on the same socket. It does not read the contents
of calls and results. It ends when the engine closes the socket.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import re
import socket
import sys
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from fumehood.cluster.ray_membership import HEADER
from fumehood.cluster.ray_nodes import NAMESPACE, actor_of, machines

Asked = tuple[Awaitable[Any], tuple[str, ...]]
"""The awaitable result of a request, and the ids of the machines whose actors serve the request."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Bridge:
    """Carries out the requests that the engine sends to the process that is connected to Ray. Each
    request names one of the public methods.

    The object holds the Ray actor of each node, by the id of the node's machine.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._actors: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, number: int, request: bytes) -> None:
        """Begin the request `request`, which names a method of this bridge and its arguments.

        The answer is sent later, with the request's number.
        """
        name, *arguments = pickle.loads(request)  # noqa: S301 - from the engine
        try:
            asked, keys = getattr(self, name)(*arguments)
        except KeyError:
            self._answer(number, ("gone", "its actor has ended"))
            return
        except RayError as error:
            self._answer(number, ("gone", _in_words(error)))
            return
        task = asyncio.ensure_future(self._finish(number, asked, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, asked: Awaitable[Any], keys: tuple[str, ...]) -> None:
        try:
            answer = ("ok", await asked)
        except RayTaskError as error:  # the node is alive
            answer = ("failed", _in_words(error))
        except RayError as error:
            if isinstance(
                error, RayActorError
            ):  # the machine may be alive, and then gets a new actor
                for key in keys:
                    self._actors.pop(key, None)
            answer = ("gone", _in_words(error))
        except Exception as error:  # what Ray raises is not documented
            answer = ("failed", _in_words(error))
        if number:
            self._answer(number, answer)

    def _answer(self, number: int, answer: tuple[str, Any]) -> None:
        body = pickle.dumps(answer)
        self._writer.write(HEADER.pack(number, len(body)) + body)

    # -- requests --------------------------------------------------------------------------

    def call(self, key: str, asked: bytes) -> Asked:
        """Call a method of the node on the machine `key`. `asked` is the pickled name of the method
        and its arguments. Return the awaitable result and the machine's id.
        """
        return self._actors[key].call.remote(asked), (key,)

    def pass_piece(self, key: str, asked: bytes, to: str, its: Any, transfer: str) -> Asked:
        """Pass one piece of an image from the node on the machine `key` to the node on the machine
        `to`, without loading the piece into this process. Return the awaitable result and both
        machines' ids.

        `asked` is the pickled call that returns the piece. `its` is the ticket for the second node,
        and `transfer` is the id of the image's transfer.
        """
        piece = self._actors[key].call.remote(asked)
        return self._actors[to].write_image.remote(its, transfer, piece), (key, to)

    def machines(self) -> Asked:
        """Return an awaitable list of the ids of the machines that are nodes, and an empty tuple.
        While it is awaited, an actor is started on each of these machines that has none.
        """
        # The tuple is empty, because no actor serves this request.
        return self._machines(), ()

    async def _machines(self) -> list[str]:
        alive = await asyncio.to_thread(machines)
        for key in self._actors.keys() - alive.keys():
            del self._actors[key]
        for key in alive.keys() - self._actors.keys():
            self._actors[key] = await asyncio.to_thread(actor_of, key, alive[key])
        return list(alive)


def _in_words(error: BaseException) -> str:
    """Return the line of an error that states the cause.

    This is the first line, or the last line if the error contains an actor's traceback.
    """
    lines = COLOURS.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "ray::" in lines[0] else 0].strip()[:200]


async def _serve(connection: socket.socket, address: str) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    await asyncio.to_thread(
        lambda: ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
        )
    )
    bridge = Bridge(writer)
    gc.freeze()
    try:
        while True:
            number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
            bridge.begin(number, await reader.readexactly(length))
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        os._exit(0)  # the engine has ended; Ray's own shutdown may take seconds


def main() -> None:
    connection = socket.socket(fileno=os.dup(0))
    asyncio.run(_serve(connection, sys.argv[1]))


if __name__ == "__main__":
    main()
