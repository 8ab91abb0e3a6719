"""Every causal class that transformers ships, built small: what is served gives the library's own text, whatever way it
is read; the rest is refused with its reason. Windows are of eight tokens here, and texts cross them several times."""
import pytest
import torch

from every_family import NAMES, small_model
from families import difference, in_pieces
from specdec.drafters.lookup import SuffixDrafter
from specdec.errors import InputError, ModelError
from specdec.models.transformers import TransformersLM
from specdec.pair import Pair

# why a class can't be served: a part of the message
REFUSED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
                    "it has layers of the kind"),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "zamba"),
                    "it forgets its recurrent state where it reads several tokens at once"),
    **dict.fromkeys(("blt", "minimax", "musicgen", "musicgen_melody"), "it can't read with our cache"),
    **dict.fromkeys(("cpmant", "mllama"), "did not keep its keys and values"),
    **dict.fromkeys(("openai-gpt", "reformer", "rwkv", "xlnet", "gemma4_unified_assistant"),
                    "keeps no keys and values"),
    **dict.fromkeys(("prophetnet", "xlm"), "its tokens attend to later ones"),
    "dory": "in pieces it says something else than at once",
    "moshi": "the library's cache keeps the last 8 tokens, and without a cache it attends to all",
    "xlstm": "keeps a recurrent state outside the library's cache",
}
# can't be built small: configs with sizes that can't be changed, or that need a package we don't have
TOO_LARGE = {"dots3_note", "dots3_note_text", "gemma3n", "gemma4_assistant"}
QUICK = ("roberta", "xlm-roberta-xl", "bamba", "gpt_neo", "mvp", "moshi", "dory", "xlm", "prophetnet", "cpmant",
         "mllama")


def texts(V):
    "Two sequences of forty tokens; padding, mask, end and beginning among them."
    ids = torch.randint(5, V, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 3], ids[:, 7], ids[:, 9], ids[0, 20], ids[1, 25] = 0, 2, 4, 1, 0
    return ids


def check_served(name, module, model):
    ids = texts(model.vocab_size)
    want = module(input_ids=ids, use_cache=False, **model.positions(0, 40)).logits
    assert difference(model.forward(ids), want) <= 1e-4
    assert difference(in_pieces(model, ids, [9, 1, 1, 5, 1, 10, 13]), want) <= 1e-4
    for prompt in (ids[:1, :10], ids[1:, 10:28]):
        theirs = module.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40,
                                 eos_token_id=None, pad_token_id=0, forced_eos_token_id=None)
        ours = Pair(model, SuffixDrafter()).generate(prompt[0].tolist(), max_new_tokens=40, ignore_eos=True)
        assert ours.generated_ids == theirs[0, prompt.shape[1]:].tolist()


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_served_right_or_refused(name):
    try: module = small_model(name)
    except Exception as error:
        assert name in TOO_LARGE, f"{name} can't be built small: {error}"
        pytest.skip(f"{name} can't be built small: {error}")
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]): TransformersLM(module)
        return
    check_served(name, module, TransformersLM(module))
    try: ring = TransformersLM(module, ring=True)
    except InputError: return  # it has no windows
    except ModelError as error: pytest.skip(f"{name} is served without a ring: {error}")
    check_served(name, module, ring)
