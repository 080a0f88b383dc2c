"""The public cases use the helpers of the rooms that they go through."""

import sys
from pathlib import Path

for room in ("data", "rewards", "trainer"):
    place = str(Path(__file__).resolve().parents[1] / room)
    if place not in sys.path:
        sys.path.append(place)
