"""The pages, in the order of the navigation."""

from __future__ import annotations

from fumehood.web.pages import inbox

PAGES = (inbox.PAGE,)
