from infra.debian_posts import make_posts, read_descriptions, write_post

TRANSLATION = """Package: first
Description-md5: 0123
Description-en: does one thing
 It does one thing,
   and does it well.
 .
 It has no options.

Package: second
Description-md5: 4567
Description-en: does nothing
"""


def test_a_description_becomes_a_post_with_whole_paragraphs() -> None:
    descriptions = read_descriptions(TRANSLATION)

    assert write_post("first", descriptions["first"]) == (
        "SUBREDDIT: r/debian\n\nTITLE: first: does one thing\n\n"
        "POST: It does one thing, and does it well.\n\nIt has no options.\n\nTL;DR:"
    )
    assert descriptions["second"] == ["does nothing"]


def test_a_call_without_a_file_gets_the_usage() -> None:
    assert "infra/debian_posts.py posts.jsonl.gz" in (make_posts([]) or "")
