"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path

import pytest

NEW = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")


def self_signed(folder: Path) -> tuple[str, str]:
    """The files of a new certificate of localhost and of its key. Skips the test where openssl is not installed."""
    chain, key = str(folder / "chain.pem"), str(folder / "key.pem")
    try:
        subprocess.run(["openssl", *NEW, "-keyout", key, "-out", chain], check=True, capture_output=True, timeout=600)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return chain, key
