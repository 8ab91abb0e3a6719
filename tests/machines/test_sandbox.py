"What a model brings along, chat templates and tokenizers, runs where it can be stopped."
import copy
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from helpers import examples
from helpers_text import talker
from specdec.drafters.base import NoDrafter
from specdec.errors import InputError, ModelError
from specdec.models import hub, sandbox
from specdec.models.hub import chat_text, encode, load_tokenizer
from specdec.models.sandbox import Ended, Refused, end_child, run_apart
from specdec.pair import Pair
from specdec.train.data import answer_marks, chat_prefix

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A 🦙 <|end|> é"},
        {"role": "assistant", "content": "ok"}, {"role": "user", "content": " two "}]


def with_template(source):
    "A copy of the tests' tokenizer that has this template."
    tokenizer = copy.deepcopy(talker().tokenizer)
    tokenizer.chat_template = source
    return tokenizer


def render(source, seconds=5.0, megabytes=256, characters=10_000, **values):
    return run_apart("template", seconds, megabytes, source=source, values=values, characters=characters)


def children():
    "The processes that this one has started and not yet buried, by the system's own list."
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# templates

CHATML = ("{% for message in messages %}{% if loop.first and message.role != 'system' %}{{ '<|im_start|>system\nHi' }}"
          "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
          "{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" + strftime_now("%Y") + system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
QWEN3 = """{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.reasoning_content is string %}
        {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
    {%- endif %}
    {{- message.role }}: {{ message.content }}
    {%- if loop.last %}{% break %}{% endif %}
{% endfor %}{{ ns.last }}"""
OTHERS = ["{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
          "{{ messages | tojson(indent=2) }}{{ documents is none }}{{ tools is none }}", "{{ messages }}",
          "  {% for m in messages %}\n  {{ m.role | upper }} {{ m.content[:3] }}\n  {% endfor %}\n{{ eos_token }}",
          "{% set d = dict(a=1) %}{{ d.items() | list }}{{ dict.fromkeys('ab') }}{{ [1, 2] | join('-') }}",
          "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
          "{% for m in messages %}{{ turn(m) }}{% endfor %}"]
THOUGHT = [{"role": "user", "content": "Why?", "name": None},
           {"role": "assistant", "content": "So.", "thinking": "hm", "tool_calls": None}]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN3, *OTHERS])
def test_a_template_gives_what_transformers_makes_of_it(source):
    tokenizer = with_template(source)
    for chat in (CHAT, THOUGHT, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}] if "+" not in source
                 and ":3" not in source and "trim" not in source else CHAT[:2]):
        for opened in (False, True):
            theirs = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened)
            assert chat_text(tokenizer, chat, opened) == theirs
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert encode(tokenizer, chat) == ids


@pytest.mark.parametrize("source", ["{{ raise_exception('roles must alternate') }}", "{{ missing.attribute }}", "{% if",
                                    "{{ messages[0].content + 1 }}", "{{ ''.__class__ }}{{ x.y.z }}",
                                    "{{ namespace(_a=1) }}"])
def test_what_a_template_refuses_is_told_as_before(source):
    tokenizer = with_template(source)
    with pytest.raises(Exception) as theirs: tokenizer.apply_chat_template(CHAT, tokenize=False)
    with pytest.raises(InputError, match="chat template refused the messages") as ours: encode(tokenizer, CHAT)
    assert type(theirs.value).__name__ in str(ours.value)
    if "_a" not in source: assert str(theirs.value) in str(ours.value)


BOMBS = {
    "power": "{{ 9**(9**9) }}", "tower": "{{ 7 ** (7 ** (7 ** (7 ** 7))) }}", "string": "{{ 'a' * 10**9 }}",
    "long": "{{ 'a' * 10**19 }}", "list": "{{ ([0] * 10**9) | length }}", "center": "{{ 'a'.center(10**10) }}",
    "output": "{% for i in range(60000) %}{{ 'abcdefghij' * 100 }}{% endfor %}",
    "doubled": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
               "{{ ns.x }}",
    "format": "{{ '%010000000000d' % 1 }}", "deep": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_in_a_template_is_one_model_error(source, monkeypatch):
    monkeypatch.setattr(hub, "TEMPLATE_SECONDS", 0.4)
    tokenizer, began = with_template(source), time.monotonic()
    for use in (lambda: encode(tokenizer, CHAT), lambda: chat_prefix(tokenizer), lambda: answer_marks(tokenizer)):
        with pytest.raises((ModelError, InputError), match="chat template") as error: use()
        assert len(str(error.value)) < 400 and "\n" not in str(error.value) and "()" not in str(error.value)
        assert isinstance(error.value, ModelError) or source == BOMBS["format"]  # Python itself refuses it
    assert time.monotonic() - began < 5
    assert encode(with_template(CHATML), CHAT)  # the next one runs


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from([
    "{{", "}}", "{%", "%}", " for i in range(", "99999", ") ", "endfor", " 'a' ", "*", "**", "9", " messages ",
    "|join ", "if ", "endif", "set x = ", "x", "~", "[0]", "(", ")", "\n", ".__class__", "\ud800", "é", "|tojson",
    "|center(", "namespace(x=1)"]), max_size=14))
def test_any_template_is_run_or_refused(parts):
    saved, hub.TEMPLATE_SECONDS = hub.TEMPLATE_SECONDS, 0.5
    try: assert isinstance(chat_text(with_template("".join(parts) or " "), CHAT), str)
    except (InputError, ModelError) as error: assert str(error)
    finally: hub.TEMPLATE_SECONDS = saved


def test_messages_that_are_no_json_are_refused_and_rich_ones_are_made_plain():
    import numpy as np
    tokenizer = with_template("{{ messages[0].n }} {{ messages[0].content }}")
    assert chat_text(tokenizer, [{"role": "user", "content": "x", "n": np.int64(3)}]) == "3 x"
    loop: list = []
    loop.append(loop)
    for wrong in (loop, {(1, 2): 3}):
        with pytest.raises(InputError, match="refused"): encode(tokenizer, [{"role": "user", "content": wrong}])


# the process

def test_calls_are_quick_and_threads_take_turns():
    assert render("{{ x }}", x=1) == "1"
    pid = sandbox._child.process.pid
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: render("{{ x }}" * 20, x=n), range(200)))
    assert found == [str(n) * 20 for n in range(200)] and time.perf_counter() - began < 5
    assert sandbox._child.process.pid == pid  # one child did it all
    text = "é🦙" * 10**6  # more than a pipe holds, in both directions
    assert render("{{ x }}{{ x }}", x=text, characters=10**7) == text * 2


def test_a_child_that_was_killed_is_replaced_and_buried():
    end_child()
    before = children()  # of other tests
    assert render("a") == "a"
    first = sandbox._child.process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert render("b") == "b" and sandbox._child.process.pid != first.pid
    with pytest.raises(Ended, match="more than 0.3 seconds"): render("{{ 9**(9**9) }}", seconds=0.3)
    end_child()
    assert set(children()) <= set(before)


def in_a_fork(queue): queue.put((render("{{ 6 * 7 }}"), sandbox._child.process.pid))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])  # which imports torch
def test_another_process_has_a_child_of_its_own(method):
    assert render("a") == "a"
    context = get_context(method)
    queue = context.Queue()
    worker = context.Process(target=in_a_fork, args=(queue,))
    worker.start()
    found, pid = queue.get(timeout=60)
    worker.join()
    assert found == "42" and pid != sandbox._child.process.pid and worker.exitcode == 0
    assert render("b") == "b"  # and ours still answers
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists(): break
        time.sleep(.05)
    else: pytest.fail("the worker's child outlives it")


ORPHAN = """
import os, sys, threading, time
from specdec.models import sandbox
def loop(): sandbox.run_apart("template", 3.0, 256, source="{{ 9**(9**9) }}", values={}, characters=9)
threading.Thread(target=loop, daemon=True).start()
while sandbox._child is None: time.sleep(.01)
time.sleep(.3)
print(sandbox._child.process.pid, "torch" in sys.modules, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="no /proc")
def test_nothing_is_left_of_a_parent_that_was_killed():
    run = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    pid, torch = run.stdout.split()
    assert torch == "False"
    for _ in range(120):  # its own alarm, a second after the limit
        if not Path(f"/proc/{pid}/stat").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text(): break
        time.sleep(.05)
    else: pytest.fail("the child still runs")


def test_where_no_python_can_be_started_it_is_said(monkeypatch, tmp_path):
    end_child()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="no Python can be started"): encode(with_template(CHATML), CHAT)
    hub.check_patterns(saved(tmp_path, "a"))  # which then stays untried


def test_the_child_imports_neither_torch_nor_what_lies_in_the_working_folder(tmp_path, monkeypatch):
    end_child()
    (tmp_path / "jinja2.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert render("{{ 1 }}") == "1"
    end_child()


def test_a_refusal_says_its_kind():
    with pytest.raises(Refused, match="TemplateError: no"): render("{{ raise_exception('no') }}")


def test_nothing_traces():
    folder = Path(sandbox.__file__).parent
    assert not [file for file in folder.rglob("*.py") if "settrace" in file.read_text(encoding="utf-8")]


# tokenizers

def saved(folder, pattern, letters="ab !"):
    "A tokenizer.json that cuts by a pattern."
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder / "tokenizer.json"


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+b", r"(.*a){12}b", r"(\s*)*\S"])
def test_a_tokenizer_with_an_expensive_pattern_is_refused_when_it_is_loaded(pattern, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "cache"))
    saved(tmp_path, pattern)
    with pytest.raises(ModelError, match="tokenizer.json can't be used: .*Panic") as error: load_tokenizer(tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "cache" / "tokenizers").exists()


def test_a_tokenizer_is_tried_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "cache"))
    saved(tmp_path, "a+")
    load_tokenizer(tmp_path)
    monkeypatch.setattr(hub, "run_apart", None)  # not called again
    assert encode(load_tokenizer(tmp_path), "ab")
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1


def test_a_panic_while_a_text_is_read_or_shown_is_a_model_error(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "check_patterns", lambda file: None)  # as if it had passed
    saved(tmp_path, r"(a+)+$")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="tokenizer gave up"): encode(tokenizer, "a" * 3000 + "!")
    with pytest.raises(BaseException, match="Onig"): tokenizer("a" * 3000 + "!")  # the library's own


# a prompt that can't fit is not read

def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(monkeypatch):
    target = talker()
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = CHATML
    pair = Pair(target, NoDrafter())
    read = []
    kind = type(target.tokenizer)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **more: read.append(len(text)) or call(self, text, **more))
    long = "7" * 20_000_000
    chats = [[{"role": "user", "content": long}], [{"role": "user", "content": [{"type": "text", "text": long}]}],
             [{"role": "user", "content": "x"}] * 2 + [{"role": "assistant", "content": long}]]
    for prompt in (long, *chats):
        for use in (pair.generate, pair.stream, pair.prefill, lambda p: list(pair.results([p, "short"]))):
            began = time.monotonic()
            with pytest.raises(InputError, match="20,000,00.* characters, .* at least .* context 96"): use(prompt)
            assert time.monotonic() - began < 2
    assert max(read, default=0) < 100
    least = hub.least_tokens(target.tokenizer, 200_000)
    assert 0 < least <= len(target.tokenizer("7" * 200_000)["input_ids"]) and hub.least_tokens(target.tokenizer, 9) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "extra.json"])
def test_a_pipe_beside_a_tokenizer_is_refused(name, tmp_path):
    saved(tmp_path, "a")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is a pipe"): load_tokenizer(tmp_path)


def test_a_template_sees_what_json_holds():
    assert json.loads(render("{{ x | tojson }}", x={"a": [1, None, True, "é"]})) == {"a": [1, None, True, "é"]}
