"""Which of the project's goals a comparison with peers reaches: `specdec bench peers --json > peers.json`, then
`python tools/goals.py peers.json`. They are set for one kind of machine, and are no business of the package."""
import json
import sys
from pathlib import Path

GOALS = {  # set for the default model in bfloat16 on two CPU cores, 128 new tokens
    "plain_vs_transformers": ("at least", 2.5),
    "plain_vs_compiled": ("at least", 1.2),
    "plain_vs_floor": ("at least", 0.45),
    "verify8_vs_floor": ("at most", 2.9),
    "prefill_vs_transformers": ("at least", 1.0),
    "ngram_vs_prompt_lookup": ("at least", 2.5),
    "overhead": ("at most", 0.03),
    "memory_vs_model": ("at most", 1.3),
    "plain_int4_vs_llamacpp_q4": ("at least", 1.0),
    "plain_bf16_vs_llamacpp_bf16": ("at least", 1.0),
    "plain_int4_vs_transformers": ("at least", 4.5),
    "prefill_vs_llamacpp": ("at least", 1.0),
    "speculative_vs_plain_float32_greedy": ("at least", 1.7),
    "speculative_vs_plain_float32_sampled": ("at least", 1.25),
    "speculative_vs_plain_bf16_greedy": ("at least", 1.3),
    "speculative_vs_plain_bf16_sampled": ("at least", 1.0),
    "speculative_vs_plain_int4_greedy": ("at least", 1.0),
    "speculative_vs_plain_int4_sampled": ("at least", 1.0),
    "speculative_vs_plain_worst": ("at least", 0.97),
    "best_vs_llamacpp_best": ("at least", 1.15),
}


def is_met(name: str, value: float) -> bool:
    "Whether a ratio reaches its goal."
    way, limit = GOALS[name]
    return value >= limit if way == "at least" else value <= limit


def goals_met(ratios: dict[str, float | None]) -> dict[str, bool]:
    "Whether each goal is met; what was not measured is neither met nor missed."
    return {name: is_met(name, ratios[name]) for name in GOALS if ratios.get(name) is not None}


def said(ratios: dict[str, float | None]) -> str: # several lines
    "Each goal with its figure, then how many are met."
    met = goals_met(ratios)
    lines = [f"{name:37} {ratios[name]:8.3f}  {way} {limit}: {'met' if met[name] else 'missed'}"
             for name, (way, limit) in GOALS.items() if name in met]
    missed = [name for name in met if not met[name]]
    words = f"{sum(met.values())} met, {len(missed)} missed"
    if missed: words += f": {', '.join(missed)}"
    if len(met) < len(GOALS): words += f", {len(GOALS) - len(met)} not measured"
    return "\n".join([*lines, f"Of {len(GOALS)} goals (for two CPU cores, bfloat16, 128 new tokens) {words}."])


if __name__ == "__main__":
    print(said(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["ratios"]))
