"""Signatures as Standard Webhooks 1.0 has them: HMAC-SHA256 over `id.timestamp.body`, version prefix `v1`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable

PREFIX = "whsec_"
MIN_BYTES, MAX_BYTES = 24, 64


def new_secret() -> str:
    """A fresh secret: `whsec_` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def read_secret(text: object) -> bytes:
    """The key of a secret. Raises `ValueError`, without the secret in its message."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        raise ValueError(f"a secret starts with {PREFIX}")
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError(f"what follows {PREFIX} is no base64") from None
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(f"a secret has {MIN_BYTES} to {MAX_BYTES} bytes, this one has {len(key)}")
    return key


def sign(keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a signed message. `timestamp`: Unix seconds. Several keys, several signatures: one is enough."""
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
