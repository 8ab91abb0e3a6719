"""The plain loop feeds the whole text, stops where it should, and gives the tokens of transformers' `generate`."""
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.autoregressive import generate_uncached
from specdec.errors import InputError, NumericalError
from specdec.sampling import SamplingParams, SeededRandom

NAN = float("nan")


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=.3)).eval()


def test_greedy_tokens_equal_generate(tiny):
    for seed in range(5):
        prompt = torch.randint(0, 101, (1, 4), generator=torch.Generator().manual_seed(seed))
        settings = dict(do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
        expected = tiny.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        found = generate_uncached(lambda ids: tiny(ids).logits, prompt[0].tolist(), SamplingParams(), SeededRandom(0),
                                  20)
        assert list(found) == expected[0, 4:].tolist()


def test_loop_feeds_the_whole_text_and_stops():
    fed = []
    def counting(ids):
        fed.append(ids.tolist())
        return torch.nn.functional.one_hot((ids + 1) % 10, 10).float() * 100
    assert list(generate_uncached(counting, [3], SamplingParams(), SeededRandom(0), 3)) == [4, 5, 6]
    assert fed == [[[3]], [[3, 4]], [[3, 4, 5]]]
    assert list(generate_uncached(counting, [3], SamplingParams(1.), SeededRandom(0), 9, frozenset({5}))) == [4, 5]


def test_loop_refuses_at_the_call(tiny):
    with pytest.raises(InputError, match="empty"): generate_uncached(tiny, [], SamplingParams(), SeededRandom(0), 3)
    for n in (0, -1, 2.5, True, None):
        with pytest.raises(InputError, match="max_new_tokens"):
            generate_uncached(tiny, [1], SamplingParams(), SeededRandom(0), n)


def test_loop_names_the_step_of_a_nan():
    def model(ids): return torch.full((1, ids.shape[1], 10), NAN if ids.shape[1] == 4 else 0.)
    tokens = generate_uncached(model, [1, 2], SamplingParams(1.), SeededRandom(0), 9)
    assert len([next(tokens), next(tokens)]) == 2
    with pytest.raises(NumericalError, match="step 2"): next(tokens)


def test_same_seed_same_text(tiny):
    def text(seed):
        return list(generate_uncached(lambda ids: tiny(ids).logits, [1, 2], SamplingParams(1.), SeededRandom(seed), 12))
    assert text(1) == text(1) != text(2)


def test_each_position_is_computed_again():
    "P prompt tokens and n new ones cost nP + n(n-1)/2 positions."
    positions = []
    def counted(ids):
        positions.append(ids.numel())
        return torch.zeros(1, ids.shape[1], 10)
    list(generate_uncached(counted, list(range(7)), SamplingParams(), SeededRandom(0), 100))
    assert sum(positions) == 100 * 7 + 100 * 99 // 2
