"""A few-shot prompt and sixteen problems of GSM8K; a package, so that an installed phloem finds them too."""
