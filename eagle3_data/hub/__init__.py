"""Mirrors of a build: a data set repository on a hub, or any fsspec URL.

`push` sends sealed shards and publishes them in grouped commits, `pull` fetches them, `check` compares a mirror with
its manifest. All three can be killed at any moment and repeated.
"""
