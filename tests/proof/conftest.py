"""The tiny checkpoints of the engine's tests, for what compares whole engines."""

import sys
from pathlib import Path

for folder in ("models", "engine"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
