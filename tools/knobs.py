"""Record what the tour's sliders show on the site: `python tools/knobs.py`.

The tour's own `generate`, with lookup and seed 0, answers the tour's own question at each place of both sliders. A run
is a list of rounds, a round a list of places in the table of texts; its last token is the model's own. It takes some
minutes on a CPU.
"""
import ast
import json
from pathlib import Path

import torch

from specdec.minimal import generate
from specdec.models.hub import fetch

ROOT = Path(__file__).resolve().parents[1]
TOUR, OUT = ROOT / "nbs" / "path" / "00_tour.ipynb", ROOT / "nbs" / "data" / "knobs.json"
KS, TEMPERATURES = [1, 2, 3, 4, 5, 6, 8, 10], [0, .3, .5, .7, 1, 1.5]
TOKENS = 48


def question(tour: Path = TOUR) -> str:
    "What the tour asks the model; raises `LookupError` if it asks nothing."
    for cell in json.loads(tour.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code" or "question =" not in "".join(cell["source"]): continue
        for node in ast.parse("".join(cell["source"])).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "question":
                return ast.literal_eval(node.value)
    raise LookupError(f"{tour.name} assigns no question: what shall the model answer?")


def load():
    "The tour's model and tokenizer."
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(fetch(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(fetch())


def prompt(tokenizer, asked: str) -> list[int]:
    "The token ids of the question, as in the tour."
    messages = [{"role": "user", "content": asked}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def recorded(model, ids: list[int], K: int, temperature: float, count: int = TOKENS) -> list[list[int]]:
    "The rounds of one answer: token ids."
    return list(generate(model, ids, K=K, temperature=temperature, max_new_tokens=count))


def main() -> None:
    "Write the file."
    model, tokenizer = load()
    asked, places = question(), {}
    ids = prompt(tokenizer, asked)
    runs = [[[[places.setdefault(token, len(places)) for token in r] for r in recorded(model, ids, K, T)] for K in KS]
            for T in TEMPERATURES]
    texts = [tokenizer.decode([token]) for token in places]
    data = {"command": "python tools/knobs.py", "question": asked, "Ks": KS, "temperatures": TEMPERATURES,
            "tokens": texts, "runs": runs}
    OUT.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
