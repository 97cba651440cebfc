"""Who asks: keys, and the namespaces that keep their caches apart.

A key's namespace is an HMAC of it under the server's secret, and a request's salt is mixed in below that: no user can name, guess
or reach another's, and no salt can equal a key's. Nothing of a key is kept but its digest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from phloem.radix import Namespace
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.server.errors import ApiError, Failure

MAX_SALT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is. Equal for equal keys."""

    root: bytes = field(repr=False)
    """From which its namespaces are derived; as secret as the key."""

    is_admin: bool = False

    def namespace(self, salt: str | None = None, *, field: str = "cache_salt") -> Namespace:
        """Return where the tenant's KV is kept, apart for each salt; `field` is what errors call the salt.

        Raises:
            InvalidRequest: The salt is empty or longer than 256 bytes.
        """
        return Namespace(salt=self.digest("salt", "" if salt is None else _checked(salt, field)))

    def digest(self, kind: str, text: str) -> str:
        """Return a name for something of the tenant's that nobody else can have or make. 64 hexadecimal digits."""
        message = f"{kind}:{text}".encode("utf-8", "surrogatepass")
        return hmac.new(self.root, message, hashlib.sha256).hexdigest()


class KeyRing:
    """The keys that a server takes."""

    def __init__(self, api_keys: Sequence[str], admin_key: str | None, secret: bytes) -> None:
        """Take the keys; without any, everybody is one tenant, and the admin too if there is no admin key."""
        self._secret = secret
        self._digests = [(self._digest(key), False) for key in api_keys]
        if admin_key is not None:
            self._digests.append((self._digest(admin_key), True))
        self._anonymous = None if api_keys else Tenant(self._derive(b"anonymous"), is_admin=admin_key is None)

    def tenant_of(self, key: str | None) -> Tenant:
        """Return who has this key. Takes the same time whether and whichever key it is.

        Raises:
            ApiError: 401, it is none of the keys.
        """
        given = self._digest(key or "")
        found: Tenant | None = None
        for digest, is_admin in self._digests:
            if hmac.compare_digest(digest, given):
                found = Tenant(self._derive(b"key" + digest), is_admin)
        if found is not None:
            return found
        # Without API keys, a key that a client was made to send is of no interest.
        if self._anonymous is not None:
            return self._anonymous
        message = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
        raise ApiError(Failure(401, "authentication", message, code="invalid_api_key"))

    def _digest(self, key: str) -> bytes:
        return self._derive(b"digest" + key.encode("utf-8", "surrogatepass"))

    def _derive(self, message: bytes) -> bytes:
        return hmac.new(self._secret, message, hashlib.sha256).digest()


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the key of a request, of `Authorization: Bearer KEY` or `x-api-key: KEY`; None if it has none."""
    values = {name.lower(): value.decode("latin-1") for name, value in headers}
    scheme, _, key = values.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return values.get(b"x-api-key") or None


def _checked(salt: str, field: str) -> str:
    num_bytes = len(salt.encode("utf-8", "surrogatepass"))
    if not 1 <= num_bytes <= MAX_SALT_BYTES:
        raise InvalidRequest(
            f"{field} has {num_bytes} bytes; it may have 1 to {MAX_SALT_BYTES}: leave it out, or pass a digest",
            field=field,
        )
    # So that no salt is the empty one, which is that of requests without a salt.
    return f"={salt}"
