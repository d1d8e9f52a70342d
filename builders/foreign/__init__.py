"""State files of other projects, read into shards: one module per form, one for the run."""
