"""Messages of other people's libraries and servers, without anything secret in them."""

from __future__ import annotations

import re

SECRETS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), "hf_***"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+"), r"\1 ***"),
    (re.compile(r"(?<=://)[^/\s@'\"]+:[^/\s@'\"]+@"), "***@"),
    (re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]+"), r"\1?***"),
    (re.compile(r"(?i)\b((?:secret|token|password|api_?key)[\w-]*['\"]?\s*[=:]\s*)['\"]?[^\s'\",;}]+"), r"\1***"),
)
"""Hub tokens; authorization headers; user:password in URLs; queries (signatures of storage links); name=value pairs."""


def redact(text: str, *known: str | None) -> str:
    """`text` without `known` secrets and without whatever looks like one."""
    for secret in known:
        if secret:
            text = text.replace(secret, "***")
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text
