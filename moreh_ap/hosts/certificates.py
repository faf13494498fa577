"""Certificates for one run.

Decides who may talk to whom: every process of a run has a certificate of an authority that was made for the run, whose
key is thrown away before `make_credentials` returns. No other can be made. Where hosts may join during the
run, the controller keeps the `Authority`, and its key, in its own memory. Must not know how keys travel.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moreh_ap.hosts.credentials import AgentSecret, Credentials

_VALID = datetime.timedelta(days=366)
_CLOCK_MARGIN = datetime.timedelta(days=1)  # clocks that differ, and zones that were entered wrongly, do not matter


class Authority:
    """Makes credentials of one run; its key is in this object alone."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "moreh-ap run")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        own = _builder(self._name, self._name, self._key).add_extension(constraints, critical=True)
        self._pem = _pem(own.sign(self._key, hashes.SHA256()))

    def credentials(self, address: str) -> Credentials:
        """Returns new credentials for the process at an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = _builder(subject, self._name, key).add_extension(alternative, critical=False)
        certificate = builder.add_extension(usage, critical=False).sign(self._key, hashes.SHA256())
        return Credentials(self._pem, _pem(certificate), _key_pem(key))


def make_credentials(addresses: Iterable[str]) -> dict[str, Credentials]:
    """Returns credentials for the process at each address, all of one authority."""
    authority = Authority()
    return {address: authority.credentials(address) for address in dict.fromkeys(addresses)}


def make_agent_secret() -> AgentSecret:
    """Returns a new secret of an agent that listens."""
    own = make_credentials(["127.0.0.1"])["127.0.0.1"]  # no client looks at the address: it knows the fingerprint
    return AgentSecret(own.certificate, own.key, secrets.token_urlsafe(32))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_MARGIN)
        .not_valid_after(now + _VALID)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
