"""Talking to an SGLang server, and starting one."""
