"""Self-signed certificates."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(file: Path, name: str = "localhost") -> Path:
    """Write a certificate for a name, and its key, into one file."""
    key = file.with_suffix(".key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},DNS:localhost",
         "-keyout", str(key), "-out", str(file)],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    file.write_bytes(file.read_bytes() + key.read_bytes())
    return file
