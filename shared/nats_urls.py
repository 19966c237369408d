"""Read the URLs of NATS servers. Needs only the standard library."""

from __future__ import annotations

from urllib.parse import urlsplit


def requires_tls(urls: list[str]) -> bool:
    """True if TLS must begin before any other data (`handshake_first`).

    Every `tls://` server must allow that. nats-py otherwise speaks TLS only if the server asks for
    it in clear text: a man in the middle could omit that request and read the password.
    """
    return any(urlsplit(url).scheme == "tls" for url in urls)


def inbox_prefix(url: str) -> str:
    """Return the prefix of this process's reply subjects: one per NATS user.

    Permissions can thus keep users out of each other's inboxes.
    """
    user = urlsplit(url).username
    return f"_INBOX_{user}" if user else "_INBOX"
