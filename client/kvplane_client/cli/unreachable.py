"""What to do about a server that cannot be used now: advice that comes with the error.

Station: asked by `session`. What gRPC says of a connection is text alone, so this reads it; where it says something
else, the advice is the general one.
"""

from __future__ import annotations

from kvplane_client.errors import UnavailableError

__all__ = ["advice_for"]

_NO_TLS_THERE = ("WRONG_VERSION_NUMBER",)
_NOT_TRUSTED = ("CERTIFICATE_VERIFY_FAILED",)
_OTHER_NAME = ("Hostname Verification Check failed",)
_CLOSED = ("Socket closed", "Connection reset by peer")


def advice_for(error: UnavailableError, server: str, *, uses_tls: bool) -> str:
    """Returns what to do.

    Args:
        error: As the call failed.
        server: The address.
        uses_tls: Whether the command was told to use TLS.
    """

    def says(signs: tuple[str, ...]) -> bool:
        return any(sign in error.message for sign in signs)

    if error.reason or error.metadata.get("missing") in ("health", "model"):
        return (
            f"the manager at {server} answers but is not ready: --wait SECONDS waits for it, and `kvplane executors`"
            " shows which executors it has and what is wrong with them"
        )
    if uses_tls and says(_NO_TLS_THERE):
        return f"{server} answers, but without TLS: leave out --tls and --tls-ca, or name another with --server"
    if uses_tls and says(_NOT_TRUSTED):
        return f"{server} has a certificate that nobody vouches for here: --tls-ca FILE trusts one, or its authority"
    if uses_tls and says(_OTHER_NAME):
        return f"the certificate is for another name than that of {server}: --server with a name that it has"
    if not uses_tls and says(_CLOSED):
        return f"{server} answers, but not in plain text: with --tls or --tls-ca, if it is a manager with TLS"
    return f"no server at {server}? Start one with `kvplane up`, wait with --wait, or name another with --server"
