"""What people program with, above `Engine` and `Branch` only: programs, chat sessions, tree search."""
