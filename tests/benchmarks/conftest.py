"""The scripts under benchmarks/ are imported as modules."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
