"""The host of a URL, parsed so strictly that no two clients could disagree about it.

Values only. Clients are known to parse some forms differently: user names before the host,
backslashes, blanks, non-ASCII names, numbers that some clients read as addresses. For a URL in such
a form, no host is returned, and the caller must assume that the URL could lead to any host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

# *Source*: RFC 3986, narrowed: no user information, no percent encoding in the host.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)(?:[/?#].*)?", re.ASCII | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{0,5}))?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_INDEX = re.compile(r"@[a-z][a-z0-9_-]{0,39}", re.ASCII)
_UNSEEN = re.compile(r"[\x00-\x20\x7f-\xa0]")
MAX_PORT = 65_535
MAX_HOST_CHARACTERS = 253
"""Maximum length of a host name. *Source*: RFC 1035. This limit also bounds what is stored with a
call, because the host names come from its program.
"""


def host_of(url: str) -> str | None:
    """Return the host of a URL, or None if clients could disagree about the host.

    The host is in lower case and has no trailing dot.
    """
    if _UNSEEN.search(url) or "\\" in url:
        return None
    found = _URL.fullmatch(url)
    authority = _AUTHORITY.fullmatch(found[1]) if found is not None else None
    if authority is None or int(authority[2] or 0) > MAX_PORT:
        return None
    return _canonical(authority[1])


def host_pattern_fault(pattern: str) -> str | None:
    """Return a clause that describes the fault of a host pattern, or None if the pattern is valid.

    Valid examples are `example.org` and `*.example.org`.
    """
    host = pattern.removeprefix("*.")
    if "*" in host:
        return "may have '*' only in front, as '*.example.org'"
    canonical = _canonical(host) if host.isascii() else None
    if canonical is None:
        return "is no host name; write it in ASCII ('xn--…'), without scheme, port and path"
    if canonical != host:
        return f"must be written as {canonical!a}"
    if pattern != host and (host.startswith("[") or _is_number(host)):
        return "is an address, which has no hosts below it"
    return None


def host_matches(host: str, pattern: str) -> bool:
    """Whether a host is equal to the pattern or, for `*.NAME`, is a subdomain of NAME."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def network_pattern(pattern: str) -> str:
    """Validate a pattern of hosts that a program may reach, and return it in lower case.

    Examples are `api.example.org` and `*.example.org:443`.

    Raises:
        ValueError: the pattern is invalid; the message is a clause.
    """
    pattern = pattern.lower()
    host, port = _split_port(pattern)
    if fault := host_pattern_fault(host):
        raise ValueError(fault)
    if port is not None and not 0 < port <= MAX_PORT:
        raise ValueError("has no valid port")
    return pattern


def network_wish(wish: str) -> str:
    """Validate an entry in the list of hosts that a call requests for its program, and return it in
    lower case.

    An entry is a host pattern, or the name of a package index that the operator has configured,
    such as `@pypi`. This function checks only the form of the name, not whether the index is
    configured.

    Raises:
        ValueError: `wish` is neither a valid pattern nor an index name; the message is a clause.
    """
    if wish.startswith("@"):
        if not _INDEX.fullmatch(wish.lower()):
            raise ValueError("is no name of a package index, such as '@pypi'")
        return wish.lower()
    return network_pattern(wish)


def network_matches(host: str, port: int, patterns: Iterable[str]) -> bool:
    """Whether any of the patterns matches this host and port. The host must be in the form that
    `host_of` returns.
    """
    for pattern in patterns:
        wanted, wanted_port = _split_port(pattern)
        if wanted_port in (None, port) and host_matches(host, wanted):
            return True
    return False


def _split_port(pattern: str) -> tuple[str, int | None]:
    host, colon, port = pattern.rpartition(":")
    is_port = colon and port.isascii() and port.isdigit()
    return (host, int(port)) if is_port else (pattern, None)


def _canonical(host: str) -> str | None:
    if host.startswith("["):
        try:
            return f"[{IPv6Address(host[1:-1])}]"
        except ValueError:
            return None
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_HOST_CHARACTERS or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    if _NUMBER.fullmatch(labels[-1]):  # some clients read 127.1 and 0x7f.0.0.1 as addresses
        return name if _is_number(name) else None
    return name


def _is_number(name: str) -> bool:
    try:
        IPv4Address(name)
    except ValueError:
        return False
    return True
