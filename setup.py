"""Read what `settings.ini` says about the package; nbdev reads the same file."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

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
                    for name in ("bench", "dev", "grammars", "native", "notebooks", "peers",
                                 "prompts", "ray")},
    entry_points={"console_scripts": cfg["console_scripts"].split(),
                  "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research",
                 "Programming Language :: Python :: 3 :: Only"],
    zip_safe=False,
)
