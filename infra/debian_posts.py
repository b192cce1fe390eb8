"""Make the posts on which docs/results.md trains authors: descriptions of 1,200 packages of Debian 12.

    python3 infra/debian_posts.py posts.jsonl.gz

Needs no packages, and access to deb.debian.org: it downloads 6 MB. ``debian_posts.txt`` names the packages.
"""

import gzip
import hashlib
import json
import lzma
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_NAMES = Path(__file__).with_name("debian_posts.txt")
_SOURCE = "http://deb.debian.org/debian/dists/bookworm/main/i18n/Translation-en.xz"
_DIGEST = "a560c943446fe34946118712ebab7cfe210700404bc064a3b0c6bdd6669fa1d5"


def make_posts(arguments: Sequence[str]) -> str | None:
    """Write the posts; returns what is wrong, if anything."""
    if len(arguments) != 1 or not arguments[0].endswith(".jsonl.gz"):
        return __doc__
    print(f"downloading {_SOURCE}")
    try:
        with urllib.request.urlopen(_SOURCE) as answer:
            packed = answer.read()
    except OSError as error:  # also of HTTP
        return f"cannot be downloaded: {error}"
    descriptions = read_descriptions(lzma.decompress(packed).decode())
    names = _NAMES.read_text().split()
    known = [name for name in names if name in descriptions]
    lines = [json.dumps({"prompt": write_post(name, descriptions[name])}) for name in known]
    with gzip.open(arguments[0], "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    print(f"wrote {len(known)} of {len(names)} posts to {arguments[0]}")
    if hashlib.sha256("\n".join(lines).encode()).hexdigest() != _DIGEST:
        return "Debian has changed some of these descriptions: the posts are not all those of docs/results.md"
    return None


def read_descriptions(text: str) -> dict[str, list[str]]:
    """The lines of the description of each package in a file ``Translation-en``, the first of which is its title."""
    descriptions = {}
    for paragraph in text.strip().split("\n\n"):
        before, _, description = paragraph.partition("\nDescription-en: ")
        name = before.partition("Package: ")[2].partition("\n")[0]
        descriptions[name] = description.rstrip("\n").split("\n")
    return descriptions


def write_post(name: str, description: Sequence[str]) -> str:
    """A post in the form of TLDR's: https://huggingface.co/datasets/trl-lib/tldr."""
    title, *lines = description
    # A line of a description begins with a space; an empty one is a dot (Debian Policy 5.6.13).
    body = "\n".join("" if line == " ." else line for line in lines)
    paragraphs = "\n\n".join(" ".join(paragraph.split()) for paragraph in body.split("\n\n"))
    return f"SUBREDDIT: r/debian\n\nTITLE: {name}: {title}\n\nPOST: {paragraphs}\n\nTL;DR:"


if __name__ == "__main__":
    sys.exit(make_posts(sys.argv[1:]))
