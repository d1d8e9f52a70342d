"""Any build: `load_dataset("eagle3_data/custom", data_dir="FOLDER")`."""

from __future__ import annotations

from eagle3_data.builders.hf import Eagle3Builder, configs


class Custom(Eagle3Builder):
    BUILDER_CONFIGS = configs(None)
