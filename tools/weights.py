"""Put the weights that the live page fetches beside it: `python tools/weights.py docs/live/weights`.

The default model, from the package's own download with its SHA-256, and the shipped head, in parts of at most 10 MB
with a list of their digests. The workflow that publishes the site does this; git ignores that folder.
"""
import argparse
from pathlib import Path

from specdec.app.live_server import write_weights


def main() -> None:
    "Write them, and say how much it is."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{folder}: {write_weights(folder) / 1e6:.1f} MB")


if __name__ == "__main__": main()
