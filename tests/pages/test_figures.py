"No page says a figure that is not in the data, and one command makes them all anew."
import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NBS = ROOT / "nbs"


@pytest.fixture(scope="module")
def figures():
    "tools/figures.py as a module."
    spec = spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(page: str) -> list[dict]: return json.loads((NBS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("prose, said", [
    ("It is 2.71 times as fast.", ["2.71"]),
    ("Plain decoding writes **97** tokens a second, and lookup 120 tokens/s.", ["97", "120"]),
    ("Between 1.2 and 1.9 times as fast as before.", ["1.2", "1.9"]),
    ("| float32 | 1.47× |\n| int4 | 1.17× |", ["1.47", "1.17"]),
    ("A round gives 3.1 tokens a round; the paper has 3.4 tokens a round.", ["3.1"]),
    ("2.5 times as fast (Li et al. 2025).", []),
    ("`9.9 times as fast`, $9.9 tokens/s$, [x](9.9 times as fast) and a K of 4.", []),
])
def test_figures_of_speed_are_found_in_prose(figures, prose, said):
    assert [figure for figure, _ in figures.claims(prose)] == said


def test_a_figure_must_stand_in_the_outputs_or_in_the_table(figures):
    cells = [{"cell_type": "markdown", "source": ["It is 1.44 times as fast."]},
             {"cell_type": "code", "source": ["1.44"], "outputs": [{"text": ["1.45 times as fast"]}]}]
    assert figures.unknown(cells) == ["1.44: It is 1.44 times as fast."]
    assert figures.unknown(cells, "| 1.44 |") == []
    cells[1]["outputs"] = [{"data": {"text/markdown": ["**1.44**"]}}]
    assert figures.unknown(cells) == []


@pytest.mark.parametrize("page", ["bench/numbers", "index"])
def test_tables_are_what_the_stored_measurements_say(page, shell, monkeypatch):
    "The cells that read data are run again; what was measured on a page is read from its saved outputs."
    monkeypatch.chdir((NBS / page).parent)
    reading = [c for c in cells_of(page) if c["cell_type"] == "code"
               and not re.search("eval: false|import specdec$|load_pair", "".join(c["source"]), re.M)]
    tables = 0
    for cell in reading:
        found = shell.run("".join(cell["source"]))
        assert shell.exc is None, shell.exc
        saved = [o["data"]["text/markdown"] for o in cell["outputs"] if "text/markdown" in o.get("data", {})]
        again = [o["data"]["text/markdown"] for o in found if "text/markdown" in o.get("data", {})]
        assert ["".join(text) for text in again] == ["".join(text) for text in saved]
        tables += len(saved)
    assert tables == {"bench/numbers": 3, "index": 2}[page]


def test_one_command_makes_every_file_and_page_that_they_come_from(figures):
    made = [file for file, _ in figures.steps()]
    shown = ("index", "bench/numbers", "bench/11_table")
    text = "\n".join("".join(c["source"]) for page in shown for c in cells_of(page))
    read = set(re.findall(r'data/([\w]+(?:\.jsonl\.gz|\.json))"', text)) - {"touch.json", "gpu.json"}
    # `tools/gpu.py` makes the latter, where a GPU is
    read |= {f"{name}.json" for name in re.findall(r'stored\("(\w+)"\)', text)}
    linked = re.findall(r"\]\(\.\./((?:path|use)/\w+\.ipynb)", "\n".join(
        "".join(c["source"]) for c in cells_of("bench/numbers") if c["cell_type"] == "code"))
    assert len(read) >= 4 and len(linked) >= 4
    assert {f"nbs/data/{name}" for name in read} <= set(made) and {f"nbs/{page}" for page in linked} <= set(made)
    assert made.index("nbs/index.ipynb") > made.index("nbs/data/table.jsonl.gz") and made[-1] == "README.md"
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nfigures:")[1].split("\n\n")[0]
    assert "tools/figures.py" in recipe


def test_a_step_keeps_what_its_command_prints_and_the_old_file_where_it_fails(figures, monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.make("a.json", """python -c "print('{\\"x\\": 1}')" --json""")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"x": 1}
    with pytest.raises(figures.subprocess.CalledProcessError): figures.make("a.json", 'python -c "1 / 0" --json')
    figures.make("a.json", 'python -c "1 / 0" model.gguf --json')  # whose file isn't here
    (tmp_path / "grid.yaml").write_text("pairs:\n- target: model.gguf\n")
    figures.make("a.json", 'python -c "1 / 0" grid.yaml --json')  # nor one that a grid names
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"x": 1}
