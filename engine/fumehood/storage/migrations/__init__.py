"""Migrations: from an empty file to the newest schema, in numbered steps.

Each module `m0001_…` has one function `upgrade(connection)` and never changes after its release.
All steps that a database lacks run in one transaction, with the version.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from fumehood.storage.migrations import (
    m0001_foundations,
    m0002_blobs,
    m0003_sessions,
    m0004_approvals,
    m0005_anchors_by_webhook,
    m0006_cache_hits,
    m0007_rate_limits,
    m0008_code_mode,
    m0009_repeats,
    m0010_blobs_of_sessions,
    m0011_overview,
    m0012_remembered_others,
    m0013_one_table_of_counters,
)

STEPS: tuple[Callable[[Connection], None], ...] = (
    m0001_foundations.upgrade,
    m0002_blobs.upgrade,
    m0003_sessions.upgrade,
    m0004_approvals.upgrade,
    m0005_anchors_by_webhook.upgrade,
    m0006_cache_hits.upgrade,
    m0007_rate_limits.upgrade,
    m0008_code_mode.upgrade,
    m0009_repeats.upgrade,
    m0010_blobs_of_sessions.upgrade,
    m0011_overview.upgrade,
    m0012_remembered_others.upgrade,
    m0013_one_table_of_counters.upgrade,
)
"""In order; the schema's version is the number of steps that a database has passed."""
