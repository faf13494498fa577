"""What a process shows the other processes of a run.

Decides where its key lies while the process lives. Must not know how keys are made: hosts need no library for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

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


@dataclass(frozen=True)
class AgentSecret:
    """By which an agent that listens and a script recognise each other, before the run has credentials.

    Attributes:
        certificate: The agent's certificate, as PEM text; it signs itself, and scripts know its fingerprint.
        key: The private key of it.
        token: What a script says first.
    """

    certificate: str
    key: str = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def from_folder(cls, folder: str) -> AgentSecret:
        """Returns the secret of which each part is a file, as Kubernetes mounts one.

        Raises:
            OSError: A file is missing or cannot be read.
        """
        return cls(*((Path(folder, name).read_text(encoding="utf-8").strip() + "\n") for name in cls.__match_args__))

    def to_folder(self, folder: str) -> None:
        """Makes the folder that `from_folder` reads, which only this user can enter: whole, or not at all.

        Raises:
            OSError: It is there already, or cannot be made.
        """
        path = Path(folder).absolute()
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for name, text in self.files().items():
                (made / name).write_text(text, encoding="utf-8")
                (made / name).chmod(0o600)
            made.rename(path)
        except BaseException:
            shutil.rmtree(made)
            raise

    def files(self) -> Mapping[str, str]:
        """Returns the content of each file that `from_folder` reads."""
        return asdict(self)

    def line(self, address: str, port: int) -> str:
        """Returns what a script is given to reach the agent, as `host_list.parse_hosts` reads it."""
        host = f"[{address}]" if ":" in address else address
        printed = fingerprint(ssl.PEM_cert_to_DER_cert(self.certificate))
        return f"tls://{host}:{port}/{printed}/{self.token.strip()}"


def context_of(files: Mapping[str, str], *, is_server: bool) -> ssl.SSLContext:
    """Returns what a process of a run shows and asks for in a connection of its own to another one of the run.

    Args:
        files: What `Credentials.as_files` returned.
        is_server: Whether the other one connects to it.
    """
    authority, certificate, key = (files[name] for name in ENGINE_VARIABLES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    return context


def fingerprint(certificate_der: bytes) -> str:
    """Returns by which a certificate is recognised."""
    return hashlib.sha256(certificate_der).hexdigest()


def _file(text: str) -> str:
    descriptor = os.memfd_create("moreh")
    os.write(descriptor, text.encode())
    return f"/proc/self/fd/{descriptor}"
