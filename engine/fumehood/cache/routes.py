"""HTTP routes of the result cache, for administrators."""

from __future__ import annotations

from fumehood.cache.in_engine import Cache
from fumehood.core.identity import Principal
from fumehood.core.status import CacheStatus, ClearedCache
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint


@endpoint("GET", "/v1/cache", Needs.ADMIN, client="cache.show")
async def show_cache(engine: Engine) -> CacheStatus:
    """Show the size of the result cache, and its hits and misses since the engine's start."""
    return engine.part(Cache).answers.status()


@endpoint("DELETE", "/v1/cache", Needs.ADMIN, client="cache.clear")
async def clear_cache(engine: Engine, caller: Principal) -> ClearedCache:
    """Drop all answers from the result cache, for all principals.

    The result of a run in progress is given only to those calls that already wait for it, and it is
    not cached.
    """
    done = engine.part(Cache).answers.clear()
    engine.log.info("cache.cleared", by=caller.id, entries=done.cleared)
    return done


CONTROL_OPERATIONS = [show_cache, clear_cache]
