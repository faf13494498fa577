"""What a process shows the other processes of a run.

Decides where its key lies while the process lives. Must not know how keys are made: hosts need no library for it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

ENGINE_VARIABLES = ("HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY")
"""Source: Monarch 0.7, which takes paths."""


@dataclass(frozen=True)
class Credentials:
    """Certificates and a key, as PEM text.

    Attributes:
        authority: The certificate by which the process knows the others.
        certificate: Its own certificate.
        key: The private key of it.
    """

    authority: str
    certificate: str
    key: str = field(repr=False)

    def as_files(self) -> dict[str, str]:
        """Returns the engine's variables, with paths of files in memory that only this process has open: no program
        that it starts has them, since the kernel closes them then."""
        return dict(zip(ENGINE_VARIABLES, map(_file, (self.authority, self.certificate, self.key))))


def fingerprint(certificate_der: bytes) -> str:
    """Returns by which a certificate is recognised."""
    return hashlib.sha256(certificate_der).hexdigest()


def _file(text: str) -> str:
    descriptor = os.memfd_create("moreh")
    os.write(descriptor, text.encode())
    return f"/proc/self/fd/{descriptor}"
