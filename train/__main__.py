"""`accelerate launch -m eagle3_data.train --config run.yaml [section.field=value ...]`"""

from __future__ import annotations

import sys

from eagle3_data.cli.train import run_module

if __name__ == "__main__":
    sys.exit(run_module())
