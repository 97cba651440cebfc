"""Models: from a name to a decoder that runs on ``phloem.kernels``.

| module | job |
|---|---|
| ``resolve``, ``builtin`` | a name, a path, an alias or a hub id becomes a directory in the Hugging Face format |
| ``gguf``, ``cache_dir`` | a ``.gguf`` file becomes such a directory, once |
| ``config`` | ``config.json`` becomes a `ModelConfig`, or an error that says what isn't supported |
| ``files``, ``weights`` | safetensors, checked against the config by name and shape |
| ``fingerprint`` | what tells two models' KV apart |
| ``decoder`` | the Llama family as one lean `Decoder` |
| ``loading`` | all of the above for one directory: `load_model` |

Import the submodules by their full names; this package imports nothing, so that a name can be resolved
without waiting for torch.
"""
