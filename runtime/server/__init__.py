"""The server: an engine behind HTTP. `phloem serve` runs it; :func:`phloem.runtime.server.app.make_app` is the ASGI application.

::

    request ─▶ Gatekeeper ─▶ a protocol's router ─▶ Service.start ─▶ Run ─▶ the protocol's answer, whole or as events
               key, size,    its fields to           a place in       chunks of n generations,
               depth, drain  SamplingParams          the gate         aborted when the client goes

Each protocol is a module with an `APIRouter` of its own (`openai_chat`, `openai_completions`, ...), listed in `app.py` with the form
of its errors. What they share is the `Service`: the engine, the settings, the gate.
"""
