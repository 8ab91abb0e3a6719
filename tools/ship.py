"""Put trained drafters where the package ships them.

    python tools/ship.py head FOLDER
    python tools/ship.py draft FOLDER

FOLDER is what `specdec distill --out` wrote for the default model.

No file gets larger than 15 MB: a head's weights are split."""
import argparse
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from specdec.drafters.head import load_head, no_other_model, save_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import load_drafter
from specdec.drafters.model import TOKENS_FILE, ModelDrafter
from specdec.errors import check
from specdec.models.files import local_path, place_for
from specdec.models.hub import all_or_nothing
from specdec.models.loading import load

DATA = Path(__file__).parent.parent / "specdec" / "data"
# where a server finds the target; ours has the same weights, rounded to four bits a weight
VERIFIER = "HuggingFaceTB/SmolLM2-135M-Instruct"


def ship(kind: str, folder: Path) -> Path:
    """Copy a trained drafter into the package; raises `InputError` or `ModelError` if it is none, or not for the
    default model."""
    target, place = load("smollm2"), DATA / f"smollm2-{kind}"
    check(folder.resolve() != place.resolve(),
          f"{folder} is the place that is shipped: name the folder that was trained.")
    expected = {"head": HeadDrafter, "draft": ModelDrafter}[kind]
    check(isinstance(load_drafter(folder, target).drafter, expected), f"{folder} doesn't hold a {kind}.")
    check(kind == "head" or (folder / TOKENS_FILE).exists(),
          f"{folder} has no {TOKENS_FILE}: a draft with the whole vocabulary isn't shipped.")
    with all_or_nothing(place_for(place, "a drafter of ours", no_other_model)) as new:
        if kind == "head":
            head = load_head(folder, target)
            save_head(head, new, target, verifier=VERIFIER)
            save_torch_state_dict(dict(head.state_dict()), new, max_shard_size="15MB")  # in place of the one file
        else:
            for name in ("config.json", "model.safetensors", TOKENS_FILE): shutil.copy(folder / name, new / name)
        load_drafter(new, target)
    return place


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("head", "draft"))
    parser.add_argument("folder", type=local_path)
    place = ship(**vars(parser.parse_args()))
    for path in sorted(place.iterdir()): print(f"{path.stat().st_size / 1e6:6.2f} MB {path.name}")
