"""Declaration of the part `elsewhere`: state in PostgreSQL, files in a bucket, and copies of a
state.
"""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="elsewhere",
    commands={
        "state": Command(
            "The state of a stopped engine.", "fumehood.elsewhere.command:state", after="images"
        )
    },
    states={
        "postgres": "fumehood.elsewhere.postgres:Postgres",
        "postgresql": "fumehood.elsewhere.postgres:Postgres",
    },
    files={"s3": "fumehood.elsewhere.bucket:Bucket"},
)
