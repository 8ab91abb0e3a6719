"""Adapters to other people's pinned releases, and what they were found to sample. Run from a checkout:
`python -m audits`.

`rules` walks verify rules and whole rounds by exact enumeration, `engines` tests engines by the tokens that they
give, and `run` installs each as it is published and asks it in a process of its own. Their page is
nbs/lossless/10_audit.ipynb."""
