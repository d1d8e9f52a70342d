"""Tests of the shards."""
