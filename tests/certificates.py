"""A CA of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificates(root: Path) -> dict[str, str]:
    """A CA and one certificate for 127.0.0.1 that it signed, as docs/security.md makes them."""
    script = """
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=node -keyout node.key -out node.csr
    printf 'subjectAltName=IP:127.0.0.1,DNS:localhost' > san
    openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out node.pem
    chmod 600 node.key
    """
    subprocess.run(["sh", "-ec", script], cwd=root, check=True, capture_output=True)
    return {
        "tls_cert_file": str(root / "node.pem"),
        "tls_key_file": str(root / "node.key"),
        "tls_ca_file": str(root / "ca.pem"),
    }
