"""SGLang's frontend language over an engine in this process: `sgl.set_default_backend(PhloemBackend(engine))`.

Needs the package `sglang`, of which only its frontend is used: its own dependencies, a torch of another version among them, are not
needed, so it is installed with `--no-deps` (the extra `phloem[sglang]` brings what the frontend imports).
"""

try:
    import sglang as _sglang  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"SGLang's frontend can't be imported ({error}): pip install 'phloem[sglang]', then "
        "pip install --no-deps sglang==0.5.5.post3"
    ) from error

from phloem.runtime.frontend.sglang.backend import PhloemBackend

__all__ = ["PhloemBackend"]
