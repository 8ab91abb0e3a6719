"What several test files use."
import torch


def assert_same_text(model, prompt, a, b, tie=1e-4):
    """Equal, or parting where the two best logits are within `tie` (float32 rounding depends on how many tokens are
    read at once)."""
    if a == b: return
    at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    ids = torch.tensor([[*prompt, *a[:at]]])
    logits = model.forward(ids, model.new_cache(ids.shape[1]), last=1)[0, 0]
    gap = (logits.max() - min(logits[a[at]], logits[b[at]])).item()
    assert gap < tie, f"The texts part at token {at}, where the logits are {gap:.2g} apart."
