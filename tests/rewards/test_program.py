from __future__ import annotations

import ast
import random
import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from magrpo.rewards import program
from magrpo.rewards.program import (
    MAX_CHARS,
    Module,
    can_be_called,
    extract_module,
    extract_preamble,
    join_modules,
    read_signature,
    returns_value,
)

PROMPT = 'import math\n\nLIMIT = 3\n\ndef shift(x):\n    return x + 1\n\ndef f(xs, k=2):\n    """Do it."""\n'


def source(text: str, defines: str = "f", prompt: str = "", drop: str = "aux") -> str:
    module = extract_module(text, defines, prompt, drop)
    ast.parse(module.source)
    return module.source


# ---------------------------------------------------------------------------------------------------- extraction
def test_a_module_survives_whole() -> None:
    text = textwrap.dedent("""\
        import math
        from typing import List

        LIMIT: int = 3
        a = 1; b = 'ü'; c = 2

        class Box:
            size = 1

        @staticmethod
        def twice(x):
            def inner(y):
                return y  # kept
            return inner(x) * 2

        def f(xs: List[int]) -> int:
            return math.gcd(*xs)
        """)
    kept = source(text)
    for piece in (
        "import math",
        "from typing import List",
        "LIMIT: int = 3",
        "b = 'ü'",
        "c = 2",
        "class Box",
        "size = 1",
    ):
        assert piece in kept
    for piece in ("@staticmethod\ndef twice", "def inner(y)", "# kept", "xs: List[int]) -> int"):
        assert piece in kept


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        "```python\ndef f(x):\n    return x\n```",
        "```\ndef f(x):\n    return x\n```",
        "```py\ndef f(x):\n    return x",
        "Sure, here it is:\n\n```python\ndef f(x):\n    return x\n```\nIt returns x.\n```\n>>> f(3)\n3\n```",
        "  1. So:\n   ```python\n   def f(x):\n       return x\n   ```\n",
        "def f(x):\n    return x\n```\nThis works.",
        "Here is the function\ndef f(x):\n    return x\nIt just returns x, doesn't it?",
        "\n\n def f(x):\n    return x",
        "def f(x):\r\n    return x\r\n",
        "def f(x):\n    return x\n\ndef g(y):\n    return (y +",
        "def f(x):\n    return x\n\nif __name__ == '__main__':\n    print(f(1))",
        "def f(x):\n    return x\n\nprint(f(1))\nassert f(1) == 1\nf\n'bye'\n",
        "def aux(x):\n    return 0\n\ndef f(x):\n    return x",
        "from helper import aux\n\ndef f(x):\n    return x",
        "import aux\n\ndef f(x):\n    return x",
        "aux = None\n\ndef f(x):\n    return x",
        "Solution\n\nNote: this\n\ndef f(x):\n    return x\n\nExplanation",
    ],
)
def test_the_same_function_out_of_every_wrapping(text: str) -> None:
    assert source(text) == "def f(x):\n    return x"


def test_islands_of_code_between_prose() -> None:
    text = "First:\nimport math\nThen a helper:\ndef g(x):\n    return x\n\nAnd:\ndef f(x):\n    return g(x)\nDone!"
    assert source(text) == "import math\n\ndef g(x):\n    return x\n\ndef f(x):\n    return g(x)"


def test_several_blocks_are_one_module() -> None:
    text = "```python\nimport math\n```\nthen\n```python\ndef f(x):\n    return math.pi\n```\n```text\nnot code\n```"
    assert source(text) == "import math\n\ndef f(x):\n    return math.pi"


def test_a_docstring_may_hold_a_fence() -> None:
    text = 'def f(x):\n    """Use:\n    ```\n    f(1)\n    ```\n    """\n    return x'
    assert source(text) == text


def test_a_docstring_in_a_block_may_hold_a_fence() -> None:
    code = 'def f(x):\n    """Use:\n\n    ```\n    f(1)\n    ```\n    """\n    return x'
    assert source(f"Here:\n```python\n{code}\n```\nDone.") == code
    tabbed = code.replace("    ", "\t")
    assert source(f"Here:\n```python\n{tabbed}\n```\nDone.") == tabbed
    block = code.replace("\n", "\n   ")
    assert source(f"1. In a list:\n   ```python\n   {block}\n   ```\n") == code


def test_a_block_may_begin_where_the_end_of_the_last_one_was_indented_too_far() -> None:
    text = "```python\ndef g(x):\n    return x\n    ```\nSecond:\n```python\ndef f(x):\n    return g(x)\n```"
    assert "def f(x):\n    return g(x)" in source(text)
    assert "def g(x):\n    return x" in source(text)


def test_other_names_of_an_import_stay() -> None:
    assert source("from helper import aux, other as o\nimport math, aux\ndef f(x): return x") == (
        "from helper import other as o\n\nimport math\n\ndef f(x): return x"
    )


def test_a_truncated_function_is_cut_to_what_parses() -> None:
    assert (
        source("def f(x):\n    if x:\n        return 1\n    return [a for") == "def f(x):\n    if x:\n        return 1"
    )


def test_continuation_of_the_prompt() -> None:
    kept = extract_module("    y = shift(xs)\n    return y\n", "f", prompt=PROMPT).source
    assert kept.endswith('def f(xs, k=2):\n    """Do it."""\n    y = shift(xs)\n    return y')
    assert returns_value(kept, "f")
    assert extract_module("    return y +\n", "f", prompt=PROMPT).source.endswith('"""Do it."""')
    assert not returns_value(extract_module("  I cannot do that.\n", "f", prompt=PROMPT).source, "f")


def test_what_is_dropped_from_an_import_is_there_the_next_time() -> None:
    text = "from tools import aux, other\n\ndef f(): return other()\n"
    assert extract_module(text, "f", drop="aux").source.startswith("from tools import other\n")
    assert extract_module(text, "f").source.startswith("from tools import aux, other\n")


def test_future_imports_are_kept_apart_and_come_first() -> None:
    modules = [
        Module((), "import math"),
        extract_module("from __future__ import annotations\ndef aux(x: A): return x", "aux"),
    ]
    combined = join_modules([*modules, modules[1]])
    assert combined.splitlines()[0] == "from __future__ import annotations"
    assert combined.count("__future__") == 1
    compile(combined, "<program>", "exec", dont_inherit=True)


@pytest.mark.parametrize(
    "text", ["", "   ", "no code here", "```python\n```", "def f(x:\n  return", "\0", "\ud800", "((((("]
)
def test_nothing_to_keep(text: str) -> None:
    assert source(text) == ""


def test_null_bytes_and_surrogates_are_unparsable_lines() -> None:
    assert source("x = \0\ndef f(x):\n    return x\ny = \ud800") == "def f(x):\n    return x"
    assert "s = '?'" in source("s = '\ud800'\ndef f(x): return s")


def test_long_texts_are_cut() -> None:
    assert len(source("def f(x):\n    return 1\n" + "# filler\n" * MAX_CHARS + "y = 1")) < MAX_CHARS
    assert source("#" * MAX_CHARS + "\ndef f(x):\n    return 1") == ""


HOSTILE = {
    "minus": "x = " + "-" * 20_000 + "1",
    "attributes": "x = a" + ".b" * 16_000,
    "sum": "x = 1" + "+1" * 16_000,
    "brackets": "x = " + "[" * 30_000,
    "lambdas": "x = " + "lambda:" * 4_000 + "1",
    "fields": "f'" + "{x}" * 10_000 + "'",
    "elif": "if 1: pass\n" + "elif 1: pass\n" * 2_500,
    "prose": "Word word.\n" * 3_000,
    "strings": "x = '''\n" * 4_000,
    "starts": "def f(\n" * 4_000,
    "deep starts": "x\n" * 2_000 + "y = " + "-" * 20_000,
    "spaces after a fence": "x y\n```" + " " * 32_000,
    "words after a fence": "x y\n```" + "a" * 32_000,
    "fences": "```\nx = (\n" * 3_000,
    "one-liners": "a;" * 16_000,
    "digits": "x = " + "9" * 30_000,
    "spaces": "def f():\n" + "".join(" " * i + "if 1:\n" for i in range(1, 200)),
    "fields after prose": "x x\n" * 1_000 + "f'" + "{x}" * 9_000 + "'",
    "cases": "match x:\n" + " case 1: pass\n" * 2_000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_neither_hangs_nor_raises(name: str) -> None:
    source(HOSTILE[name])


def test_nesting_is_refused_at_a_fixed_depth() -> None:
    shallow, deep = "x = 1" + " + 1" * 200, "x = 1" + " + 1" * 400
    assert source(shallow) == shallow
    assert source(deep) == ""


# ------------------------------------------------------------------------------------------------------ other parts
def test_preamble_is_what_stands_above_the_entry_point() -> None:
    expected = "import math\n\nLIMIT = 3\n\ndef shift(x):\n    return x + 1"
    assert extract_preamble(PROMPT, "f").source == expected
    assert extract_preamble("import math\n\ndef f(x):\n", "f").source == "import math"
    assert extract_preamble("Write a function f.", "f").source == ""


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('import math\n\ndef f(x):\n    """d"""\n\nr = f(1)\n', "import math"),
        ("import math\n\ndef f(x):\n    ...\n\nx = int(input())\nfor y in [x]:\n    z = f(y)\n", "import math"),
        ("import math\n\ndef f(x):\n    # TODO\n\nr = f(1)\n", "import math"),
        ("Write f.\nr = f(1)\n", ""),
        ("Write f.\nLIMIT = 3\ng = lambda x: f(x)\n", "LIMIT = 3\n\ng = lambda x: f(x)"),
        (
            "def g(x):\n    return f(x)\n\ndef f(x):\n    ...\n\nclass Box: ...",
            "def g(x):\n    return f(x)\n\nclass Box: ...",
        ),
    ],
)
def test_examples_of_a_prompt_that_need_the_entry_point_are_left_out(prompt: str, expected: str) -> None:
    assert extract_preamble(prompt, "f").source == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return x", True),
        ("return", False),
        ("return None", False),
        ("pass", False),
        ("yield x", True),
        ("if x:\n        return x\n    return None", True),
        ("def g():\n        return x", False),
        ("g = lambda: (yield)", False),
        ("class A:\n        def g(self):\n            return 1", False),
    ],
)
def test_returns_value(body: str, expected: bool) -> None:
    assert returns_value(f"def f(x):\n    {body}\n", "f") is expected
    assert not returns_value(f"def f(x):\n    {body}\n", "g")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f = lambda x: x", True),
        ("from functools import partial\nf = partial(max, 1)", True),
        ("f = Solver().solve", True),
        ("f: Callable = g", True),
        ("from math import gcd as f", True),
        ("class f:\n    def __new__(cls, x): return x", True),
        ("try:\n    from fast import f\nexcept ImportError:\n    def f(x): return x", True),
        ("def f(x): return x\nf = 3", True),
        ("def f(x): pass\nf = cache(f)", False),
        ("f = 3", False),
        ("f = [g]", False),
        ("def g():\n    f = h\n    return f", False),
        ("x = f", False),
        ("", False),
    ],
)
def test_what_may_be_called(text: str, expected: bool) -> None:
    assert can_be_called(text, "f") is expected


def test_the_last_definition_counts() -> None:
    assert not returns_value("def f(x): return x\ndef f(x): pass", "f")
    assert not returns_value("class A:\n    def f(self): return 1", "f")
    assert not returns_value("async def f(x): return x", "f")


@pytest.mark.parametrize(
    ("parameters", "call"),
    [
        ("xs", "xs"),
        ("xs: List[int], k: int = 2", "xs, k"),
        ("a, /, b, *rest, c=1, **more", "a, b, *rest, c=c, **more"),
        ("", ""),
        ("a={'x': [1]}, *, b", "a, b=b"),
    ],
)
def test_the_signature_and_the_arguments_that_pass_it_on(parameters: str, call: str) -> None:
    assert read_signature("f = g", "f") == ("def f(*args, **kwargs):", "*args, **kwargs")
    source = f"ü = 1\n@cache\ndef f({parameters}) -> int:  # ü\n    '''Doc.'''\n    return 1\n\nz = 2"
    assert read_signature(source, "f") == (f"@cache\ndef f({parameters}) -> int:  # ü", call)


def test_the_signature_of_one_line_and_of_a_nested_decorator() -> None:
    assert read_signature("def f(x): return x", "f") == ("def f(x):", "x")
    assert read_signature("def f(x):\n    @cache\n    def g():\n        return 1\n    return g()", "f") == (
        "def f(x):",
        "x",
    )


# ------------------------------------------------------------------------------------------------------- properties
@given(st.text(), st.text(max_size=30))
@example("```python\n" * 3, "def f(")
@example(" \x0cdef f(): return 1", "")
@settings(max_examples=200)
def test_any_text_gives_a_module(text: str, prompt: str) -> None:
    for module in (extract_module(text, "f", prompt, "aux"), extract_preamble(text, "f")):
        program.parse_source(module.source)


WORDS = [
    "def f(x):",
    "return",
    "x",
    "(",
    ")",
    ":",
    "\n",
    "\n    ",
    "if",
    "else:",
    "'''",
    "'",
    "aux",
    "=",
    "```",
    "\\",
    "#",
]
SOUP = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@given(SOUP)
@settings(max_examples=300)
def test_python_like_text_gives_a_module(text: str) -> None:
    module = extract_module(text, "f", PROMPT, "aux")
    program.parse_source(module.source)
    returns_value(module.source, "f")
    ast.parse(join_modules([module, module]))


def longest_prefix(text: str) -> list[str]:
    """The longest run of lines from the start that parses, one line less at a time."""
    lines = text.split("\n")
    for stop in range(len(lines), 0, -1):
        try:
            return [ast.unparse(node) for node in ast.parse("\n".join(lines[:stop])).body]
        except SyntaxError:
            continue
    return []


BASE = textwrap.dedent('''\
    def f(xs, k=2):
        """Doc
        string."""
        total = [
            x
            for x in xs
        ]
        try:
            y = {"a": (1,
                       2)}
        except ValueError:
            return None
        if k:
            return sum(total) + \\
                k
        elif xs:
            s = """a
    b"""
            return s
        return f"{y}"

    def g(z):
        return z
    ''')


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_cutting_at_the_error_equals_cutting_line_by_line(seed: int, edits: int) -> None:
    rng, text = random.Random(seed), BASE
    for _ in range(edits):
        at = rng.randrange(len(text))
        text = (
            text[:at] + rng.choice(["", "(", "'", '"""', "\n", ":", " ", "x y", "\\"]) + text[at + rng.randrange(3) :]
        )
    text = text[: rng.randrange(len(text) // 2, len(text) + 1)]
    if not text.startswith("def f"):
        return
    try:
        ast.parse(text)
    except SyntaxError:
        expected = longest_prefix(text)
        found = [ast.unparse(node) for node, _ in program.find_parsable_runs(text)]
        assert found[: len(expected)] == expected
