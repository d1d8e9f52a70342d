"""Making data: samples, answers by the target, plan, extraction, the named datasets."""
