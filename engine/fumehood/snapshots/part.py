"""The part that adds snapshots and forks of sessions to the product."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="snapshots",
    commands={
        "sessions snapshot": Command(
            "Copy a session's disk once its calls have finished. The copy lasts until the session "
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
            "Restore a session's files from a snapshot. Everything that runs in the session ends, "
            "and its variables are lost.",
            "fumehood.snapshots.command:restore",
            after="delete-snapshot",
        ),
        "sessions fork": Command(
            "Create sessions with the files of a session or of its snapshot. Prints the name or id "
            "of each.",
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
