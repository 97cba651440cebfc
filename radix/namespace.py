"""What a token path belongs to besides its tokens.

KV computed by one model, weights version, adapter or KV dtype must never serve another, and a caller's salt keeps
tenants apart. Each of these is a field of its own, hence no value of one field can ever equal a value of another.

>>> Namespace(salt="x") == Namespace(adapter="x")
False
>>> Namespace(salt="x") == Namespace(salt="x")
True
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.radix.errors import InvalidNamespace

MAX_FIELD_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of one tree. Hashable, and equal exactly when every field is.

    Raises:
        InvalidNamespace: A field has the wrong type, is empty where it must not be, or has more than
            `MAX_FIELD_BYTES` bytes; a long secret goes through a digest first.
    """

    model: str = ""  # fingerprint of the weights' architecture and files
    weights_version: int = 0  # moves when weights are replaced under the same model
    adapter: str | None = None  # name and version, as in "fr@2"
    kv_dtype: str | None = None
    salt: str | None = None  # the caller's own separation, as of tenants

    def __post_init__(self) -> None:
        _require_text("model", self.model)
        version = self.weights_version
        if not isinstance(version, int) or isinstance(version, bool):
            raise InvalidNamespace(f"namespace field weights_version must be an int, not {_type(version)}")
        if version < 0:
            raise InvalidNamespace(f"namespace field weights_version must be 0 or more, not {version}")
        for field in ("adapter", "kv_dtype", "salt"):
            value = getattr(self, field)
            if value is None:
                continue
            _require_text(field, value)
            if not value:
                raise InvalidNamespace(
                    f"namespace field {field} must not be empty; leave it out or pass None"
                )


def _require_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidNamespace(f"namespace field {field} must be a str, not {_type(value)}")
    num_bytes = len(value.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_FIELD_BYTES:
        raise InvalidNamespace(
            f"namespace field {field} has {num_bytes} bytes, more than the limit of {MAX_FIELD_BYTES}; "
            "pass a digest of it"
        )


def _type(value: object) -> str:
    return type(value).__name__
