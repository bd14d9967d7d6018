"""Why an image was not built: the causes that the output of a step shows, and their remedies.

Host side, pure.
"""

from __future__ import annotations

from collections.abc import Iterable

LINES_SEARCHED = 40
"""Number of output lines of a failed program, counted from the end, that are searched for a known
cause.
"""

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
        "The index may have changed it. Lock again only if you know why.",
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
"""Rows of texts that may occur in a program's output, the cause that they show, and the remedy."""

LINES_SHOWN = 5
"""Number of output lines, counted from the end, that an error shows if the cause is unknown."""


CAUSE_UNKNOWN = "Fix that and build again."
"""The remedy for an unknown cause. The message then also contains the output of the step."""


class ImageBuildError(Exception):
    """An image was not built. The message tells the operator the cause (`found`) and the
    `remedy`.
    """

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found} {remedy}")
        self.found = found
        self.remedy = remedy


def build_error(what: str, output: Iterable[str]) -> ImageBuildError:
    """Return the error for a failed step. `what` says which step failed, and begins the message.
    `output` contains the last lines that the step printed.

    If the output shows a known cause, the error names this cause and its remedy. Otherwise it shows
    the output.
    """
    lines = [line for line in output if line.strip()]
    text = "\n".join(lines)
    for signs, found, remedy in _SIGNS:
        if any(sign in text for sign in signs):
            return ImageBuildError(f"{what}: {found}", remedy)
    last = " | ".join(line.strip()[:200] for line in lines[-LINES_SHOWN:]) or "it printed nothing"
    return ImageBuildError(f"{what}: {last}.", CAUSE_UNKNOWN)
