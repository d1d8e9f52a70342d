"""Shards: layout, writer, reader, index."""
