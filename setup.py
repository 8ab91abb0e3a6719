"""Read what `settings.ini` says about the package; nbdev reads the same file."""
from configparser import ConfigParser
from pathlib import Path
from shutil import copytree

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

LIVE = Path("specdec", "data", "live")  # in git, a link to the live page among the notebooks


def put_live(tree: Path) -> None:
    "Where git has written the link as a file with the place in it (Windows): the page itself."
    if not LIVE.is_file(): return
    (tree / LIVE).unlink(missing_ok=True)
    copytree(LIVE.parent / LIVE.read_text(encoding="utf-8").strip(), tree / LIVE)


class Built(build_py):
    "What a wheel is made of."
    def run(self) -> None:
        super().run()
        if not self.editable_mode: put_live(Path(self.build_lib))


class Archived(sdist):
    "What the source archive is made of."
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        put_live(Path(base_dir))


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=["specdec", "specdec.*"]),
    package_data={"specdec": ["data/*", "data/*/*", "py.typed"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split()
                    for name in ("bench", "deepspeed", "dev", "grammars", "native", "notebooks",
                                 "peers", "prompts", "ray", "vllm")},
    cmdclass={"build_py": Built, "sdist": Archived},
    entry_points={"console_scripts": cfg["console_scripts"].split(),
                  "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research",
                 "Programming Language :: Python :: 3 :: Only"],
    zip_safe=False,
)
