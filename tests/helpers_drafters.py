"Small random targets and heads, for the tests of drafters."
import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.drafters.adaptive import MOST
from specdec.drafters.choose import COST, PRIOR, VERIFY, Chooser, drafting
from specdec.drafters.head import Head, init_from_target, share_embedding
from specdec.drafters.head_drafter import HeadDrafter
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom

CPU = torch.device("cpu")
V = 24  # tokens of a head's target
DRAFT = torch.tensor([0, 3, 4, 9, 10, 15, 20, 23])
OPTIONS = {
    "paper": {}, "two layers": dict(num_layers=2, norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True), "norms": dict(num_layers=2, fc_norm=True, norm_output=True),
}


def packable_llama(dtype=torch.float32, layers=4, seed=0):
    "A random Llama with 96 tokens whose matrices can be packed in fours."
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return load_model(Path(folder), CPU, dtype)


def random_target(folder, V=V, depth=5, dtype=torch.float32, **sizes):
    "A random Llama for a head to read, saved in the folder and loaded."
    torch.manual_seed(0)
    sizes = (
        dict(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64,
        )
        | sizes
    )
    config = LlamaConfig(vocab_size=V, num_hidden_layers=depth, initializer_range=.3, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(Path(folder), CPU, dtype)


def random_head(target, tokens=DRAFT, seed=1, **options):
    "Every weight random, norms too: a norm of ones would hide that it is left out."
    head = init_from_target(target, tokens, **{"dtype": target.dtype, **options})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + .3 * noise if "norm" in name else noise / parameter.shape[-1] ** .5)
    return head


def windowed(head, target, window=6):
    "The same head; its layers see so many positions."
    config = replace(head.config, decoder=copy.deepcopy(head.config.decoder))
    config.decoder.layer_types = ["sliding_attention"] * config.decoder.num_hidden_layers
    config.decoder.sliding_window = window
    new = Head(config, DRAFT).to(head.fc.weight)
    new.load_state_dict(head.state_dict())
    return share_embedding(new, target)


# The exact law, on three words
LENGTH, PROMPT, TINY = 4, [0, 2], dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)


def chain_rule(target, sampling):
    "What the target says alone, by the chain rule in float64, each row from a forward without a past."
    distribution = {(): 1.0}
    for _ in range(LENGTH):
        distribution = {
            (*text, token): weight * p
            for text, weight in distribution.items()
            for token, p in enumerate(
                sampling.probs(target.forward(torch.tensor([[*PROMPT, *text]]), target.new_cache(9), last=1)[0, -1])
                .double()
                .tolist()
            )
            if p
        }
    return distribution


def error(target, drafter, sampling, K):
    "Total variation between the walked law of the production loop and the chain rule."
    def program(rng):
        return tuple(
            token for r in speculate(target, drafter, PROMPT, sampling, rng, K, LENGTH) for token in r.emitted
        )

    found, expected = exact_distribution(program), chain_rule(target, sampling)
    assert sum(found.values()) == 1
    return sum(abs(float(found.get(text, 0)) - expected.get(text, 0)) for text in found.keys() | expected.keys()) / 2


class Noting:
    "A model that notes how many tokens each forward reads, before another one reads them."
    def __init__(self, model): self.model, self.sizes = model, []
    def __getattr__(self, name): return getattr(self.model, name)
    def forward(self, ids, *rest, **more):
        self.sizes.append(ids.shape[1])
        return self.model.forward(ids, *rest, **more)


def read(target, tokens, layers):
    "The target's features at each of the tokens, [B, T, F]."
    return target.forward(tokens, target.new_cache(tokens.shape[1]), layers=layers)[1]


def difference(a, b):
    "The largest difference, relative to the largest number."
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def proposals(state, K=3, sampling=SamplingParams(1.0), seed=0):
    "What is proposed for a sequence with that seed."
    return state.propose(K, sampling, SeededRandom(seed))


def fresh(head, target, text):
    "The state of a sequence that a head's drafter has read at once."
    features = read(target, torch.tensor([text]), head.config.layers)[0, :-1]
    return HeadDrafter(head, target).start(text, features, 40)


def started(drafter, tokens):
    "The state of a sequence that begins with that text."
    return drafter.start(tokens, None, 10 ** 6)


# Sequences of one drafter

def drafts(drafter, target, prompt, count=12, K=3, temperature=1.0, seed=0):
    """What is drafted in each round of a sequence, in which 0, 1, 2 or 3 tokens of the draft are accepted, one after
    the other (of a tree the first one at most), and another token follows."""
    def features(tokens): return read(target, torch.tensor([tokens]), drafter.layers)[0] if drafter.layers else None
    tokens, rng = list(prompt), SeededRandom(seed)
    shown = features(tokens)
    state = drafter.start(list(tokens), None if shown is None else shown[:-1], len(tokens) + 4 * count)
    for i in range(count):
        draft = state.propose(K, SamplingParams(temperature), rng)
        q, parents = getattr(draft, "q", None), getattr(draft, "parents", None)
        yield list(draft.tokens), parents, None if q is None else hash(q.numpy().tobytes())
        new = [*draft.tokens[:i % 4 if parents is None else min(1, i % 4)], prompt[i % len(prompt)]]
        tokens += new
        shown = features(tokens)
        state.commit(new, None if shown is None else shown[-1 - len(new):-1])


def take_turns(streams, seed=0):
    "What each of them yields if it is random whose turn it is."
    found, random = [[] for _ in streams], Random(seed)
    running = list(enumerate(map(iter, streams)))
    while running:
        i, stream = chosen = random.choice(running)
        try: found[i].append(next(stream))
        except StopIteration: running.remove(chosen)
    return found


def check_sequences_apart(make, target, prompts, **how):
    """That one drafter object gives to several sequences, which grow in turns while one more is left half way,
    what a drafter of its own gives to each; and that it does so again."""
    prompts = [*prompts, prompts[0]]  # two that begin alike, with draws of their own
    alone = [list(drafts(make(), target, prompt, seed=i, **how)) for i, prompt in enumerate(prompts)]
    drafter = make()
    left = drafts(drafter, target, prompts[-2], seed=9, **how)
    for _ in range(4): next(left)
    for turn in range(2):
        streams = [drafts(drafter, target, prompt, seed=i, **how) for i, prompt in enumerate(prompts)]
        assert take_turns(streams, turn) == alone
    said = [tokens for sequence in alone for tokens, *_ in sequence]
    assert sum(map(bool, said)) > len(said) / 4 and alone[0] != alone[1]  # else this would say little


class PayingLookahead:
    "The chooser, with one drafter and the positions of its draft tokens, as a controller of the draft length."
    def __init__(self, c=COST, verify=VERIFY, most=MOST, prior=PRIOR):
        self.chooser, self.most = Chooser((c,), verify, (prior,), keep=0.985), most

    @property
    def lookahead(self): return self.chooser.choose([range(self.most)])[1]

    def observe_step(self, proposed, accepted):
        time = 1 + drafting(self.chooser.c[0], proposed)  # longer drafts count as more rounds
        self.chooser.learn(0, range(proposed), accepted, min(accepted + 1, proposed), time)

    def reset(self): self.chooser.forget()


class StepLookahead:
    "A controller of one's own: two tokens more after a draft that was accepted as a whole, else one less."
    def __init__(self, initial=5):
        self.initial = initial
        self.reset()

    def reset(self): self.lookahead = self.initial

    def observe_step(self, proposed, accepted):
        if proposed: self.lookahead = max(1, self.lookahead + (2 if accepted == proposed else -1))
