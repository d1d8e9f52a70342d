"""The named datasets, one small module each."""
