"""The command `phloem`."""
