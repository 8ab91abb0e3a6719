"""Our feature heads and blocks against the `speculators` library: logits compared step by step, row by row.

    python tools/speculators.py build/speculators --out nbs/data/speculators.json

The library's model class loads our folders, we load its folders, and those that its converter makes of checkpoints in
the older format of EAGLE's authors. The first argument is a folder for a virtual
environment of its own (made once, about 1.5 GB: PyTorch for the CPU, and the library with what its import needs;
torchvision, torchaudio and CUDA are left out). The features are the default model's, on a real prompt, in float32."""
import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

LIBRARY = "speculators==0.9.0"
NEEDS = ["torch==2.13.0", "transformers<=5.19.0", "pydantic>=2", "pydantic-settings>=2", "loguru<=0.7.3",
         "safetensors", "openai>=2", "datasets>=4,<=5.1.0"]
ALONE = ["hs-connectors==0.9.0", LIBRARY]  # installed without their dependencies
STEPS = 4
OURS = {  # options of the heads that we save
    "as in the paper": {},
    "as in the paper, stored with the embedding": dict(embedding=True),
    "two layers, norm before the residual": dict(num_layers=2, norm_before_residual=True),
    "one norm before fc": dict(norm_before_fc=True),
    "a norm for each feature, states after the norm": dict(fc_norm=True, norm_output=True),
    "all tokens": dict(draft_every=1),
}
THEIRS = {  # options of the heads that the library saves
    "Llama layers": dict(num_layers=1),
    "Qwen3 layers, two of them": dict(num_layers=2, model_type="qwen3", norm_before_residual=True),
    "all tokens": dict(num_layers=1, draft_every=1),
    "the state after the last layer, named first": dict(num_layers=1, layers=[30, 3, 12]),
    "a window of 8 tokens, in the first of two layers": dict(num_layers=2, decoder=dict(
        layer_types=["sliding_attention", "full_attention"], sliding_window=8)),
    "a window of 8 tokens, in a Qwen3 layer": dict(num_layers=1, model_type="qwen3", decoder=dict(
        layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=True)),
    "a partial rotary factor": dict(num_layers=1, rotary=dict(partial_rotary_factor=0.5)),
    "no draft_vocab_size in the config": dict(num_layers=1, first=32000),
}
BLOCKS = {  # options of the blocks that both save
    "a block (dflash)": dict(sample_from_anchor=False),
    "a block (dflash) from its anchor": dict(num_layers=2),
    "a chain (dspark)": dict(markov_rank=16),
    "a chain (dspark) of two layers, with a confidence head": dict(
        num_layers=2, markov_rank=16, enable_confidence_head=True, confidence_head_with_markov=True),
    "a chain (dspark) not from its anchor": dict(
        sample_from_anchor=False, markov_rank=8, enable_confidence_head=True),
    "a block of all tokens": dict(draft_every=1, sample_from_anchor=False),
}
ANCHORS, SIZE = [5, 12, 19], 5  # where blocks begin, and how many rows each has
OLDER = "an older checkpoint, turned into a folder by speculators convert"
SHIPPED = "the trained head of the package, in two files"
EVERY = 6  # the draft vocabulary is every sixth token, unless the options say otherwise


def features_of(options: dict) -> str:
    "What the features of a case are called in the file that hands them over."
    return f"features {options['layers']}" if "layers" in options else "features"


# in the environment of its own: nothing of specdec is imported there

def theirs(work: Path) -> None:
    "Load each of our folders and save their logits; make heads of their own, and save these with their logits."
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.convert.entrypoints import convert_model

    from speculators import Eagle3DraftModel, SpeculatorModelConfig

    older = work / "older"  # what `speculators convert` runs
    convert_model(str(older), (older / "verifier").read_text(), "eagle3", str(work / "converted"))
    given = load_file(work / "features.safetensors")
    def logits(model, features: str = "features") -> dict:
        found = []
        def keep(module, inputs, output): found.append(output.detach()[0].contiguous())
        hook = model.lm_head.register_forward_hook(keep)
        tokens = given["tokens"][:, 1:]
        documents = torch.zeros(1, tokens.shape[1], dtype=torch.long)
        with torch.no_grad(): model.eval()(given[features][:, :-1], tokens, documents, ttt_steps=STEPS)
        hook.remove()
        return {f"{step}": rows for step, rows in enumerate(found)}

    def config_of(folder: Path):
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"  # flex attention is for GPUs
        return config

    for folder in sorted((work / "ours").iterdir()):
        model = Eagle3DraftModel.from_pretrained(folder, config=config_of(folder), dtype=torch.float32)
        # 0.9.0 takes an embedding that isn't stored for a loaded one
        if not (folder / "embedded").exists(): model._load_verifier_weights(overwrite_embed_tokens=True)
        save_file(logits(model), work / f"{folder.name}.theirs.safetensors")
    for i, options in enumerate(THEIRS.values()):
        stored = json.loads((work / "ours" / "0" / "config.json").read_text())
        kind = dict(num_hidden_layers=options["num_layers"], model_type=options.get("model_type", "llama"))
        layer = stored["transformer_layer_config"] | kind | options.get("decoder", {})
        layer["rope_parameters"] |= options.get("rotary", {})
        del stored["specdec"], layer["dtype"]
        V, every = layer["vocab_size"], options.get("draft_every", EVERY)
        ids = torch.arange(options["first"]) if "first" in options else torch.arange(0, V, every)
        stored |= dict(transformer_layer_config=layer, draft_vocab_size=len(ids),
                       norm_before_residual=options.get("norm_before_residual", False))
        if "layers" in options: stored["eagle_aux_hidden_state_layer_ids"] = options["layers"]
        if "first" in options: del stored["draft_vocab_size"]
        (work / "config.json").write_text(json.dumps(stored))
        torch.manual_seed(i)
        model = Eagle3DraftModel(config_of(work))
        known = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        model.load_vocab_mappings(known, ids - torch.arange(len(ids)))
        model.load_verifier_weights()
        for name, parameter in model.named_parameters():
            if "norm" in name: parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(work / "theirs" / str(i))
        if "first" in options:  # the library writes its default
            saved = json.loads((work / "theirs" / str(i) / "config.json").read_text())
            assert saved.pop("draft_vocab_size") == options["first"]
            (work / "theirs" / str(i) / "config.json").write_text(json.dumps(saved))
        save_file(logits(model, features_of(options)), work / "theirs" / f"{i}.safetensors")
    blocks_theirs(work, config_of, given)


def blocks_theirs(work: Path, config_of, given: dict) -> None:
    "The same of blocks: what the library's own forward hands to its loss."
    from unittest import mock

    import torch
    from safetensors.torch import load_file, save_file
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.core import DSparkDraftModel

    tokens, features = given["tokens"], given["features"]
    def logits(model) -> dict:
        "Of each row, and of the confidence head if there is one."
        found, module = [], type(model).__module__
        def anchors(*_): return torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
        def caught(said, _, more, *rest, **options):
            found.append(said[0].view(len(ANCHORS), SIZE, -1))
            if getattr(model, "confidence_head", None) is not None: found.append(more[0].view(len(ANCHORS), SIZE))
            return None, {}
        with mock.patch("speculators.models.dflash.core.select_anchors", anchors), \
             mock.patch(f"{module}.compute_metrics", caught), torch.no_grad():
            model.eval()(features, tokens, torch.ones(tokens.shape), torch.zeros(*tokens.shape, model.config
                         .transformer_layer_config.hidden_size), torch.zeros_like(tokens), max_anchors=len(ANCHORS))
        skipped = int(not model.config.sample_from_anchor)
        rows = {f"{k}": found[0][:, k + skipped].contiguous() for k in range(SIZE - skipped)}
        return rows | {f"{SIZE - skipped}": c[:, skipped:].contiguous() for c in found[1:]}

    for folder in sorted((work / "blocks").iterdir()):
        stored = json.loads((folder / "config.json").read_text())
        cls = DSparkDraftModel if stored["speculators_model_type"] == "dspark" else DFlashDraftModel
        model = cls.from_pretrained(folder, config=config_of(folder), dtype=torch.float32)
        model.load_verifier_weights()
        save_file(logits(model), work / f"{folder.name}.blocks.safetensors")
        ids = load_file(folder / "model.safetensors").get("d2t")  # and one of the library's own, of the same shape
        torch.manual_seed(int(folder.name))
        model = cls(config_of(folder))
        if ids is not None:
            ids = ids + torch.arange(len(ids))
            model.load_vocab_mappings(
                torch.zeros(model.verifier_vocab_size, dtype=torch.bool).index_fill(0, ids, True),
                ids - torch.arange(len(ids)))
        model.load_verifier_weights()
        for name, parameter in model.named_parameters():
            if "norm" in name: parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(work / "their_blocks" / folder.name)
        save_file(logits(model), work / "their_blocks" / f"{folder.name}.safetensors")


# in our own environment

def block_rows(block, tokens, features, off=0): # [1, A, D] of each row, then [1, A, rows] of the confidence head
    "What a block of ours says where the text goes on as it does."
    import torch
    anchors = torch.tensor(ANCHORS)
    states = block.states(tokens, features, torch.zeros_like(anchors), anchors, block.config.most)
    before = tokens[0][anchors[:, None] + torch.arange(block.config.most) - off]
    rows = [*block.logits(states, before).unbind(1)]
    confidence = block.confidence(states, before)
    return [row[None] for row in rows + ([] if confidence is None else [confidence])]


def save_older(head, folder: Path, verifier: Path) -> None:
    "A head as EAGLE's authors store one: the layer called midlayer, sizes in one flat config, a pickle."
    import torch

    layer = head.config.decoder.to_dict()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "hidden_act", "vocab_size", "max_position_embeddings")
    config = {name: layer[name] for name in names} | dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, torch_dtype="float32",
        draft_vocab_size=head.config.draft_vocab_size, rope_theta=layer["rope_parameters"]["rope_theta"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "verifier").write_text(str(verifier))
    weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")


def environment(folder: Path) -> Path: # its Python
    "Make the environment unless it is there."
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"Making an environment for {LIBRARY} …", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", *ALONE], check=True)
        done.touch()
    return python


def difference(ours, theirs) -> float:
    "max |ours - theirs| / max |theirs|; infinite if the shapes differ or a number is missing."
    if ours.shape != theirs.shape or not theirs.isfinite().all(): return float("inf")
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(python: Path, length: int = 96) -> dict:
    "Run both directions; the results as data."
    import torch
    from safetensors.torch import load_file, save_file

    from specdec.drafters.block import init_block, load_block, save_block
    from specdec.drafters.head import init_from_target, load_head, save_head, share_embedding
    from specdec.drafters.load import shipped
    from specdec.models.hub import encode, fetch, load_tokenizer, prompts
    from specdec.models.loading import load_model

    target = load_model(fetch(), torch.device("cpu"), torch.float32)
    tokens = torch.tensor([encode(load_tokenizer(fetch()), prompts()[5].text)[:length]])
    def made(draft_every=EVERY, **options):
        head = init_from_target(target, torch.arange(0, target.vocab_size, draft_every), **options)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                # norms of 1 would hide one that is left out
                if "norm" in name: parameter += 0.1 * torch.randn_like(parameter)
        return head

    def made_block(draft_every=EVERY, **options):
        block = init_block(target, torch.arange(0, target.vocab_size, draft_every), mask_token_id=4, block_size=SIZE,
                           layers=layers, **options)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if "norm" in name: parameter += 0.1 * torch.randn_like(parameter)
                if "markov" in name or "confidence" in name: parameter += 0.3 * torch.randn_like(parameter)
        return block

    torch.manual_seed(0)
    heads = []
    for options in OURS.values():
        heads.append(made(**{name: value for name, value in options.items() if name != "embedding"}))
    layers = heads[0].config.layers
    def read(layers): return target.forward(tokens, target.new_cache(tokens.shape[1]), layers=layers)[1].clone()
    features = read(layers)
    given = dict(features=features) | {
        features_of(options): read(sorted(options["layers"])) for options in THEIRS.values() if "layers" in options}
    rows = []
    def line(direction, case, ours, stored):
        found, same = [], []
        for s, step in enumerate(ours):
            theirs = stored[str(s)][:step.shape[1]]
            found.append(difference(step[0], theirs))
            same.append(torch.equal(step[0].argmax(-1), theirs.argmax(-1)))
        rows.append(dict(direction=direction, case=case, differences=found, same_choices=same))

    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        work = Path(temporary)
        for name in ("theirs", "their_blocks"): (work / name).mkdir()
        save_file(dict(tokens=tokens, **given), work / "features.safetensors")
        for i, (head, options) in enumerate(zip(heads, OURS.values())):
            save_head(head, work / "ours" / str(i), target, verifier=str(fetch()), embedding="embedding" in options)
            if "embedding" in options: (work / "ours" / str(i) / "embedded").touch()
        save_older(heads[0], work / "older", fetch())
        trained = work / "ours" / str(len(heads))
        shutil.copytree(shipped("smollm2-head"), trained)
        config = json.loads((trained / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = str(fetch())  # there is no hub to take it from
        (trained / "config.json").write_text(json.dumps(config))
        heads.append(share_embedding(load_head(trained, target), target))
        blocks = [made_block(**options) for options in BLOCKS.values()]
        for i, block in enumerate(blocks): save_block(block, work / "blocks" / str(i), target, verifier=str(fetch()))
        # -I: or this file would be what `import speculators` finds
        command = [str(python), "-I", "-W", "ignore", __file__, "--theirs", str(work)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode: raise SystemExit(f"The library failed:\n{done.stderr[-4000:]}")
        for i, (case, head) in enumerate(zip([*OURS, SHIPPED], heads)):
            stored = load_file(work / f"{i}.theirs.safetensors")
            line("ours, loaded by speculators", case, head(tokens, features, STEPS), stored)
        for i, (case, options) in enumerate(THEIRS.items()):
            head = load_head(work / "theirs" / str(i), target)
            stored = load_file(work / "theirs" / f"{i}.safetensors")
            line("theirs, loaded by us", case, head(tokens, given[features_of(options)], STEPS), stored)
        converted = load_head(work / "converted", target)
        same = dict(enumerate(heads[0](tokens, features, STEPS)))
        line("theirs, loaded by us", OLDER, share_embedding(converted, target)(tokens, features, STEPS),
             {str(s): rows[0] for s, rows in same.items()})
        for i, (case, block) in enumerate(zip(BLOCKS, blocks)):
            line("ours, loaded by speculators", case, block_rows(block, tokens, features),
                 load_file(work / f"{i}.blocks.safetensors"))
            other = share_embedding(load_block(work / "their_blocks" / str(i), target), target)
            line("theirs, loaded by us", case, block_rows(other, tokens, features),
                 load_file(work / "their_blocks" / f"{i}.safetensors"))
        chain = [*BLOCKS].index("a chain (dspark)")
        line("ours, its bias a place off", "negative control", block_rows(blocks[chain], tokens, features, 1),
             load_file(work / f"{chain}.blocks.safetensors"))
        wrong = made()
        stored = load_file(work / "0.theirs.safetensors")
        line("ours, against another head", "negative control", wrong(tokens, features, STEPS), stored)
    ask = ("import json; from importlib.metadata import version; "
           "print(json.dumps({name: version(name) for name in ('speculators', 'torch', 'transformers')}))")
    versions = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout
    command = "python tools/speculators.py build/speculators --out nbs/data/speculators.json"
    return dict(command=command, model="SmolLM2-135M-Instruct", dtype="float32", positions=tokens.shape[1],
                steps=STEPS, features=list(layers), versions=json.loads(versions), comparisons=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environment", nargs="?", type=Path,
                        help="folder of the virtual environment; made if it isn't there")
    parser.add_argument("--out", type=Path, help="where the JSON goes; without it, it is printed")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs: return theirs(arguments.theirs)
    if arguments.environment is None: parser.error("say which folder the environment is, or shall be, in")
    text = json.dumps(compare(environment(arguments.environment)), indent=1) + "\n"
    if arguments.out: arguments.out.write_text(text)
    else: print(text, end="")


if __name__ == "__main__": main()
