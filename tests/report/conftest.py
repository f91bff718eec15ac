"""The reader of pages can be imported by its tests."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent))  # for page_reader
