"""Convert raw GSM8K to parquet files for training.

    python examples/data_preprocess/gsm8k.py --data_source ./train.jsonl --local_dir ./data/gsm8k

reads a parquet, jsonl or json file (a ``test.*`` beside a ``train.*`` is converted too), an Arrow dataset folder or a
hub dataset, and writes ``train.parquet`` and ``test.parquet``.
"""

import sys
from pathlib import Path

# The clone that this script lies in comes before any installed package called verl.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl.data.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
