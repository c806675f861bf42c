"""The bearer token, read once and never shown (R42).

Surrounding spaces are dropped. A token that is not valid in an HTTP header is refused before anything is sent or
printed.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import ConfigError

TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"  # environment variable with the bearer token, for both programs
MAX_CHARS = 4096


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the token; None if the variable is empty or not set. Raises ConfigError, which does not show the token."""
    # Tokens often come from a file that ends with a newline.
    token = environment.get(TOKEN_VARIABLE, "").strip()
    wrong = sum(not 0x21 <= ord(char) <= 0x7E for char in token)
    if wrong or len(token) > MAX_CHARS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} cannot be sent in an HTTP header",
            found=f"{len(token)} characters, {wrong} of them spaces, control or non-ASCII characters",
            wanted=f"at most {MAX_CHARS} visible ASCII characters on one line",
            remedy=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) for both programs",
        )
    return token or None
