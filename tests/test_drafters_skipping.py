"Layers left out: rows of logits, the overlap by hand, and the search for layers."
import pytest
import torch

from helpers_drafters import packable_llama
from specdec.core import InputError
from specdec.drafters.model import expected_acceptance, rows_on, search_layers
from specdec.sampling import Transform


@pytest.fixture(scope="module")
def tiny(): return packable_llama()


WRITTEN = [([1, 2, 3], [4, 5, 6, 7, 8, 9]), ([9, 8], [7, 6, 5])]


def test_rows_are_those_before_each_written_token(tiny):
    rows = rows_on(tiny, WRITTEN)
    assert rows.shape == (9, 96)
    for at, (prompt, text, i) in enumerate([(p, t, i) for p, t in WRITTEN for i in range(len(t))]):
        ids = torch.tensor([[*prompt, *text[:i]]])
        torch.testing.assert_close(rows[at], tiny.forward(ids, tiny.new_cache(32), last=1)[0, 0], rtol=1e-4, atol=1e-4)


def test_expected_acceptance_by_hand(tiny):
    p = Transform(1.0)(rows_on(tiny, WRITTEN))
    q = Transform(1.0)(rows_on(tiny.skip([1]), WRITTEN))
    assert expected_acceptance(p, tiny, WRITTEN, Transform(1.0)) == pytest.approx(1, abs=1e-6)
    assert expected_acceptance(p, tiny.skip([1]), WRITTEN, Transform(1.0)) == pytest.approx(
        torch.minimum(p, q).sum(-1).mean().item(), abs=1e-5
    )


def test_the_search_takes_the_best_layer_at_each_step(tiny):
    p = Transform(1.0)(rows_on(tiny, WRITTEN))
    def alpha(*skip): return expected_acceptance(p, tiny.skip(skip), WRITTEN, Transform(1.0))
    (first, a), (second, b) = search_layers(tiny, WRITTEN, 2, width=4)
    assert a == pytest.approx(max(alpha(i) for i in range(4))) and alpha(*first) == pytest.approx(a)
    assert set(first) < set(second) and b == pytest.approx(max(alpha(*first, i) for i in range(4) if i not in first))
    too_many = dict(count=4, width=4), dict(count=3, width=2), dict(count=1, width=5)
    for wrong in (*too_many, dict(count=0), dict(count=True)):
        with pytest.raises(InputError, match="count"): search_layers(tiny, WRITTEN, **wrong)
    with pytest.raises(InputError, match="no text"): search_layers(tiny, [], 1, 2)
