"""Why an image could not be built, with the cure. Host side."""

from __future__ import annotations

from collections.abc import Iterable

_SIGNS = (
    (
        ("No space left on device", "no space left on device", "not enough free space"),
        "There is no disk space left.",
        "Make room (an image needs about 1 GB while it is built), or set TMPDIR to a larger disk.",
    ),
    (
        (
            "Temporary failure resolving", "Could not resolve", "Failed to fetch",
            "Unable to connect", "Could not connect", "Network is unreachable",
            "no such host", "connection refused", "i/o timeout", "TLS handshake",
            "NewConnectionError", "Max retries exceeded", "ConnectTimeoutError", "ProxyError",
            "Read timed out", "Connection broken", "SSLError",
        ),
        "The package mirror, index or registry cannot be reached.",
        "Check the network and the proxy variables (http_proxy, https_proxy).",
    ),
    (
        ("Unable to locate package", "has no installation candidate"),
        "A package of the list does not exist in this release.",
        "Check packages.txt and the release; a base must be Debian of the same release.",
    ),
    (
        ("DO NOT MATCH THE HASHES",),
        "A file is not the one that was locked.",
        "Whoever runs the index may have changed it. Lock anew only if you know why.",
    ),
    (
        ("manifest unknown", "not found", "repository does not exist"),
        "There is no such image.",
        "Check the name and the digest.",
    ),
    (
        ("nodev", "noexec"),
        "The directory for temporary files cannot hold a root file system.",
        "Set TMPDIR to a directory that is mounted without nodev and noexec.",
    ),
)  # fmt: skip
LINES_SHOWN = 5


class ImageTrouble(Exception):
    """An image was not built. The message is for the person at the command line."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(f"{found} {cure}")
        self.found = found
        self.cure = cure


def has_sign(heard: str) -> bool:
    """Whether `trouble_in` knows what this speaks of."""
    return any(sign in heard for signs, _, _ in _SIGNS for sign in signs)


def trouble_in(what: str, heard: Iterable[str]) -> ImageTrouble:
    """The trouble that the last lines of a program speak of."""
    lines = [line for line in heard if line.strip()]
    text = "\n".join(lines)
    for signs, found, cure in _SIGNS:
        if any(sign in text for sign in signs):
            return ImageTrouble(f"{what}: {found}", cure)
    last = " | ".join(line.strip()[:200] for line in lines[-LINES_SHOWN:]) or "it said nothing"
    return ImageTrouble(f"{what}: {last}.", "Mend that and build again.")
