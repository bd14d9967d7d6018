"""Rows of registered definitions, and which versions were switched on or off."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from fumehood.core.json_types import JsonObject
from fumehood.storage.schema import DEFINITIONS, SWITCHES


def all_definitions(connection: Connection) -> list[JsonObject]:
    """Every registered document."""
    return list(connection.execute(select(DEFINITIONS.c.document)).scalars())


def put_definition(
    connection: Connection, name: str, version: str, document: JsonObject, at: str
) -> None:
    """Keep a document, in place of an older one of the same name and version."""
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
    """Forget a document and its switch."""
    for table in (DEFINITIONS, SWITCHES):
        connection.execute(delete(table).where(table.c.name == name, table.c.version == version))


def all_switches(connection: Connection) -> dict[tuple[str, str], bool]:
    """What was switched, by name and version; of any source's tools."""
    rows = connection.execute(select(SWITCHES)).mappings()
    return {(row["name"], row["version"]): row["is_active"] for row in rows}


def put_switch(connection: Connection, name: str, version: str, is_active: bool) -> None:
    """Switch a version on or off."""
    here = (SWITCHES.c.name == name) & (SWITCHES.c.version == version)
    connection.execute(delete(SWITCHES).where(here))
    connection.execute(insert(SWITCHES), {"name": name, "version": version, "is_active": is_active})
