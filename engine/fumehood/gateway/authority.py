"""The gateway's certificate authority. It issues the certificates with which the gateway answers
programs in place of the hosts.

Host side. The authority is created once for each state directory and stored there. Its key never
enters a sandbox, and only sandboxes trust its certificate. A host's certificate is issued when a
program first connects to the host.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fumehood.storage.directory import write_private

LIFETIME = timedelta(days=3650)
"""How long the authority's certificate is valid. The certificates of hosts expire at the same
time.
"""

SKEW = timedelta(days=2)
"""Maximum time by which the clock in a sandbox may be behind the engine's clock."""


class Authority:
    """Issues a TLS certificate for each host that programs connect to. The gateway presents this
    certificate when it answers programs in place of the host.

    The attribute `certificate` is the authority's own certificate, as PEM text.
    """

    def __init__(self, file: Path | None) -> None:
        """Read the authority from `file`. If the file does not exist, create a new authority and
        store it there. If `file` is None, create an authority that exists only in memory.

        Raises:
            ValueError: the file contains no authority.
            OSError: the file cannot be read or written.
        """
        if file is not None and file.exists():
            pem = file.read_bytes()
            key = load_pem_private_key(pem, None)
            certificate = x509.load_pem_x509_certificate(pem)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _authority(key)
            if file is not None:
                write_private(file, _key_pem(key) + certificate.public_bytes(Encoding.PEM))
        self._key, self._certificate = key, certificate
        self.certificate = certificate.public_bytes(Encoding.PEM).decode()
        self._host_key = ec.generate_private_key(ec.SECP256R1())
        self.context_for = lru_cache(self._context)

    def _context(self, host: str) -> ssl.SSLContext:
        """Return the TLS context with which the gateway answers programs in place of `host`.

        `host` is a name in its canonical form, or an IP address. If a program asks for a different
        host in its TLS handshake, the handshake fails.
        """
        bare = host.removeprefix("[").removesuffix("]")
        try:
            name: x509.GeneralName = x509.IPAddress(ip_address(bare))
        except ValueError:
            name = x509.DNSName(bare)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._certificate.subject)
            .public_key(self._host_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - SKEW)
            .not_valid_after(self._certificate.not_valid_after_utc)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load(context, _key_pem(self._host_key) + certificate.public_bytes(Encoding.PEM))

        def check_name(_: ssl.SSLObject, asked: str | None, __: ssl.SSLContext) -> int | None:
            is_same = asked is None or asked.lower().removesuffix(".") == bare
            return None if is_same else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

        context.sni_callback = check_name
        return context


class Hello:
    """Finds the server name in the first bytes of a client's TLS handshake, without answering the
    client.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._incoming = ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._note
        self._tls = context.wrap_bio(self._incoming, ssl.MemoryBIO(), server_side=True)

    def feed(self, piece: bytes) -> str | None:
        """Add received bytes, and return the server name as soon as it is known.

        Return None if more bytes are needed. Return "" if the client sends no server name, or if
        the bytes are not TLS.
        """
        self._incoming.write(piece)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError:
            pass
        return self._names[0] if self._names else ""

    def _note(self, _: ssl.SSLObject, asked: str | None, __: ssl.SSLContext) -> int:
        self._names.append((asked or "").lower().removesuffix("."))
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
    key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
    decipher_only=False,
)  # fmt: skip


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fumehood gateway")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS_CERTIFICATES, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate and its key into `context`. `pem` contains both.

    The `ssl` module reads certificates only from files, so this function writes `pem` to an
    anonymous file in memory.
    """
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
