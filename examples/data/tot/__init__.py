"""Prompts and puzzles of the Game of 24 in Tree of Thoughts; a package, so that an installed phloem finds them too."""
