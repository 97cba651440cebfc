"""Workloads that run on an engine in the process or on any server of OpenAI's protocol, token for token the same."""
