"""A certificate for `localhost`, signed by an authority made for one test."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """PEM files."""

    authority: Path
    chain: Path
    key: Path


def certificate(folder: Path) -> Certificate:
    """Make an authority and a certificate for localhost with openssl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new = ["req", "-newkey", "rsa:2048", "-nodes"]
    authority = ["-x509", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"]
    sign = ["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    for words in (
        [*new, *authority],
        [*new, "-subj", "/CN=localhost", "-keyout", "tls.key", "-out", "tls.csr"],
        [*sign, "-in", "tls.csr", "-extfile", "names", "-out", "tls.crt"],
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
    return Certificate(folder / "ca.pem", folder / "tls.crt", folder / "tls.key")
