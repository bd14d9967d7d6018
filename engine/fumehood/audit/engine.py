"""The audit chain of `fumehood.Engine`.

Host side, above the kernel's `Engine`. Only that class's public members are used.
"""

from __future__ import annotations

from fumehood.audit.in_engine import Audit
from fumehood.audit.service import AuditService
from fumehood.engine import Engine


class EngineWithAudit(Engine):
    """An engine that can also verify its audit chain and rotate the chain's key."""

    @property
    def audit(self) -> AuditService:
        """The audit chain of this engine."""
        return self.part(Audit).service
