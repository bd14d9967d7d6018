"""`AsyncClient` as programs use it: the core client with the methods that parts add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fumehood.client.async_client import AsyncClient as AsyncKernelClient
from fumehood.parts import with_methods

if TYPE_CHECKING:
    from fumehood.batches.async_client import AsyncClientWithBatches as AsyncBatchingClient
    from fumehood.formats.async_client import AsyncClientWithFormats as AsyncHandlingClient
    from fumehood.projects.async_client import AsyncClientWithProjects as AsyncCopyingClient
    from fumehood.snapshots.async_client import AsyncClientWithForks as AsyncForkingClient
    from fumehood.streams.async_client import AsyncClientWithStreams as AsyncStreamingClient
    from fumehood.workspace.async_client import AsyncClientWithFiles as AsyncClientOfFiles

    class AsyncClientOfParts(
        AsyncBatchingClient,
        AsyncHandlingClient,
        AsyncCopyingClient,
        AsyncForkingClient,
        AsyncStreamingClient,
        AsyncClientOfFiles,
    ): ...

else:
    AsyncClientOfParts = with_methods(AsyncKernelClient)


class AsyncClient(AsyncClientOfParts):
    """A client of the callers' socket. An asynchronous context manager, for one event loop.

    It connects when it sends the first request, and reconnects if the daemon was restarted.

    Raises:
        DaemonUnavailable: from every method, if no server answers in time.
    """
