"""Tools that administrators register while the engine runs. Such a tool can be called immediately,
and again after a restart.

Host side, used by the control socket. Invariants: a registered tool is REST or MCP, fully checked,
and in the database before it can be called; tools of other sources can be enabled and disabled, but
not changed.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from fumehood.core.errors import IdempotencyConflict, PermissionDenied, ToolNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, ToolIndex, tool_of_document
from fumehood.storage.changes import OneChange, recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.schema import DEFINITIONS, SWITCHES


class Registrations:
    """Registers, replaces, deletes, enables and disables tools.

    `load_faults` contains the faults of stored definitions that this version of the engine refuses.
    In all methods, `by` is the principal that makes the change, and `now` is the time of the
    change.
    """

    def __init__(self, index: ToolIndex, database: Database) -> None:
        self._index = index
        self._database = database
        self._changing = OneChange(self._reload)
        self._load(*database.read_now(_all_rows))

    def apply_switches(self) -> None:
        """Enable and disable versions of tools as recorded in the database. Must be called after
        the tools of a source were reloaded.
        """
        for (name, version), is_active in self._switches.items():
            self._index.switch(name, version, is_active=is_active)

    async def register(
        self, document: JsonObject, *, by: Principal, now: datetime
    ) -> RegisteredTool:
        """Register one version of a tool from its definition, and return the tool.

        Raises:
            InvalidDefinition: the document has faults. The error lists all of them.
            IdempotencyConflict: this version is already registered.
        """
        async with self._changing():
            tool = self._checked(document)
            name, version = tool.definition.name, tool.definition.version
            if self._index.find(name, version) is not None:
                raise IdempotencyConflict(
                    f"{name}@{version} is already registered. Register a new version, or replace "
                    "this one."
                )
            return await self._put(tool, document, "tool.register", by, now)

    async def replace(
        self, name: str, version: str, document: JsonObject, *, by: Principal, now: datetime
    ) -> RegisteredTool:
        """Replace the definition of a registered version, and return the tool. The new definition
        must have the same name and version.

        Raises:
            ToolNotFound: there is no such version.
            PermissionDenied: the version comes from another source.
            InvalidDefinition: the document has faults. The error lists all of them.
        """
        async with self._changing():
            self._require_own(name, version)
            tool = self._checked(document)
            if (tool.definition.name, tool.definition.version) != (name, version):
                fault = f"name: must be {name} in version {version}, as it is addressed"
                raise InvalidDefinition(tool.definition.name, [fault])
            return await self._put(tool, document, "tool.replace", by, now)

    async def delete(self, name: str, version: str, *, by: Principal, now: datetime) -> None:
        """Delete a registered version of a tool. Calls of it that are already running continue.

        Raises:
            ToolNotFound: there is no such version.
            PermissionDenied: the version comes from another source.
        """
        async with self._changing():
            self._require_own(name, version)
            await self._database.write(
                recorded(
                    lambda connection: delete_definition(connection, name, version),
                    at=now, by=by.id, action="tool.delete", subject=f"{name}@{version}",
                )
            )  # fmt: skip
            self._switches.pop((name, version), None)
            self._index.remove(name, version)

    async def switch(
        self, name: str, version: str | None, *, is_active: bool, by: Principal, now: datetime
    ) -> list[RegisteredTool]:
        """Enable or disable one version of a tool, or all versions if `version` is None. Return
        these versions.

        The tool may come from any source.

        Raises:
            ToolNotFound: there is no such tool or version.
        """
        async with self._changing():
            versions = [tool.definition.version for tool in self._index.versions(name)]
            chosen = [each for each in versions if version in (None, each)]
            if not chosen:
                which = name if version is None else f"{name}@{version}"
                raise ToolNotFound(f"There is no tool {which[:80]!r}. List the tools to see all.")

            def change(connection: Connection) -> None:
                here = (SWITCHES.c.name == name) & SWITCHES.c.version.in_(chosen)
                connection.execute(delete(SWITCHES).where(here))
                rows = [{"name": name, "version": v, "is_active": is_active} for v in chosen]
                connection.execute(insert(SWITCHES), rows)

            action = "tool.activate" if is_active else "tool.deactivate"
            details: JsonObject = {"versions": chosen}
            await self._database.write(
                recorded(change, at=now, by=by.id, action=action, subject=name, details=details)
            )
            for each in chosen:
                self._switches[name, each] = is_active
                self._index.switch(name, each, is_active=is_active)
            return [tool for each in chosen if (tool := self._index.find(name, each)) is not None]

    async def _reload(self) -> None:
        stored = await self._database.write(_all_rows)
        self._index.replace_source(Source.API, ())
        self._load(*stored)

    def _load(self, documents: list[JsonObject], switches: dict[tuple[str, str], bool]) -> None:
        self.load_faults: list[InvalidDefinition] = []
        for document in documents:
            try:
                self._index.put(self._checked(document))
            except InvalidDefinition as fault:
                self.load_faults.append(fault)
        self._switches = switches
        self.apply_switches()

    async def _put(
        self,
        tool: RegisteredTool,
        document: JsonObject,
        action: str,
        by: Principal,
        now: datetime,
    ) -> RegisteredTool:
        name, version = tool.definition.name, tool.definition.version
        self._index.require_free(name, Source.API)
        await self._database.write(
            recorded(
                lambda connection: put_definition(connection, name, version, document, stamp(now)),
                at=now, by=by.id, action=action, subject=f"{name}@{version}",
                details={"document": document},
            )
        )  # fmt: skip
        self._index.put(tool)
        if (name, version) in self._switches:
            self._index.switch(name, version, is_active=self._switches[name, version])
        return tool

    def _checked(self, document: JsonObject) -> RegisteredTool:
        return tool_of_document(document, Source.API, self._index.secrets)

    def _require_own(self, name: str, version: str) -> None:
        tool = self._index.get(f"{name}@{version}")
        if tool.source is not Source.API:
            raise PermissionDenied(
                f"{name}@{version} comes from {tool.source}, not from here, and can only "
                "be switched off. Do not retry."
            )


def _all_rows(
    connection: Connection,
) -> tuple[list[JsonObject], dict[tuple[str, str], bool]]:
    """Return the stored definitions. Also return, by name and version, which versions of tools the
    administrators have enabled (True) or disabled (False).
    """
    rows = connection.execute(select(SWITCHES)).mappings()
    switches = {(row["name"], row["version"]): row["is_active"] for row in rows}
    return all_definitions(connection), switches


def all_definitions(connection: Connection) -> list[JsonObject]:
    return list(connection.execute(select(DEFINITIONS.c.document)).scalars())


def put_definition(
    connection: Connection, name: str, version: str, document: JsonObject, at: str
) -> None:
    """Store a definition. If a definition with this name and version exists, it is replaced. `at`
    is the time of the change, as a text.
    """
    here = (DEFINITIONS.c.name == name) & (DEFINITIONS.c.version == version)
    made = connection.execute(select(DEFINITIONS.c.created_at).where(here)).scalar()
    connection.execute(delete(DEFINITIONS).where(here))
    row = {
        "name": name,
        "version": version,
        "document": document,
        "created_at": made or at,
        "updated_at": at,
    }
    connection.execute(insert(DEFINITIONS), row)


def delete_definition(connection: Connection, name: str, version: str) -> None:
    """Delete a definition, and the record of whether the tool version is enabled."""
    for table in (DEFINITIONS, SWITCHES):
        connection.execute(delete(table).where(table.c.name == name, table.c.version == version))
