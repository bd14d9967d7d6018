"""Snapshots and forks as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="snapshots",
    commands={
        "sessions snapshot": Command(
            "Copy the files of a session with a disk, after its calls. It stays until the session "
            "ends.",
            "fumehood.snapshots.command:take",
            after="end",
        ),
        "sessions snapshots": Command(
            "List the snapshots of a session, oldest first.",
            "fumehood.snapshots.command:show",
            after="snapshot",
        ),
        "sessions delete-snapshot": Command(
            "Delete a snapshot of a session.",
            "fumehood.snapshots.command:delete",
            after="snapshots",
        ),
        "sessions restore": Command(
            "Give a session the files of a snapshot again. What runs in it ends, its variables are "
            "gone.",
            "fumehood.snapshots.command:restore",
            after="delete-snapshot",
        ),
        "sessions fork": Command(
            "Make sessions with the files of a session, or of its snapshot. Prints a name or id "
            "for each.",
            "fumehood.snapshots.command:fork",
            after="restore",
        ),
    },
    operations="fumehood.snapshots.routes:OPERATIONS",
    methods={
        "AsyncClient": "fumehood.snapshots.async_client:AsyncClientWithForks",
        "Client": "fumehood.snapshots.sync.client:ClientWithForks",
        "Engine": "fumehood.snapshots.engine:EngineWithSnapshots",
    },
    in_engine="fumehood.snapshots.in_engine:SnapshotsPart",
)
