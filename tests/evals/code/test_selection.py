"""Tests of which code is selected from an answer, and by which rule."""

import time

from evals.code.selection import select_function

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """The sum of a and b."""'
HELPER = "import math\n\nclass Helper:\n    def one(self):\n        return 1\n\n    def two(self):\n        return 2"
TESTS = "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n    assert add(0, 0) == 0"
DOCUMENTED = 'def add(a, b):\n    """The sum.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b'
BARE = 'def add(a, b):\n    """The sum.\n\n```\nadd(1, 2)\n```\n"""\n    return a + b'
METHOD_FIRST = "class Sum:\n    def add(self, a, b):\n        return None\n\n" + ADD
WRONG, MORE = ADD.replace("+", "-"), ADD + " + 0"
CLASS = "class S:\n    def add(self):\n        return 0"
CACHED = "from functools import lru_cache\n\n@lru_cache\n" + ADD
IN_DOCSTRING = 'def helper():\n    """\n    def add(a, b): wrong\n    """\n    return 1\n\n' + ADD


def fence(code: str, tag: str = "python", fence: str = "```") -> str:
    return f"{fence}{tag}\n{code}\n{fence}\n"


BLOCKS = {  # the rule "block": name: (answer, code)
    "one block": (fence(ADD), ADD),
    "in the second block": ("Sure!\n" + fence(HELPER) + "then\n" + fence(ADD), ADD),
    "no tag": (fence(ADD, ""), ADD),
    "the end is missing": ("```python\n" + ADD, ADD),
    "an end is missing before it": ("```python\n" + HELPER + "\n" + fence(ADD), ADD),
    "four backticks, ended by three": ("````python\n" + ADD + "\n```\n", ADD),
    "tildes around backticks": ("~~~\n" + fence(ADD) + "~~~\n", ADD),
    "indented in a list": (
        "1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
        ADD,
    ),
    "longer tests after it": (fence(ADD) + "and tests:\n" + fence(TESTS), ADD),
    "tests before it": (fence(TESTS) + fence(ADD), ADD),
    "a comment that names it": (fence("# def add(a, b): see below\nx = 1") + fence(ADD), ADD),
    "prose that names it": (
        "I write def add(a, b): as asked.\n" + fence(ADD) + "def add is done.",
        ADD,
    ),
    "a decorator": (fence(CACHED), CACHED),
    "a method before the function": (fence(METHOD_FIRST), METHOD_FIRST),
    "its name in a docstring": (fence(IN_DOCSTRING), IN_DOCSTRING),
    "a fence in its docstring": (fence(DOCUMENTED), DOCUMENTED),
    "a fence without a tag in its docstring": (fence(BARE) + "Done.\n" + fence(TESTS), BARE),
    "text before the fence": ("Here: " + fence(ADD) + "Done", ADD),
    "the end glued to the code": ("```python\n" + ADD + "```\nDone", ADD),
    "a draft that is thought": ("<think>\n" + fence(WRONG) + "</think>\n" + fence(ADD), ADD),
    "a signature first": (fence(STUB) + "Now in full:\n" + fence(ADD), ADD),
    "a signature last": (
        fence(ADD) + "It keeps the signature\n" + fence("def add(a, b):\n    pass"),
        ADD,
    ),
    "not implemented first": (
        fence("def add(a, b):\n    raise NotImplementedError") + fence(ADD),
        ADD,
    ),
    "a corrected version": (fence(WRONG) + "Wait, no:\n" + fence(ADD), ADD),
    "a correction that does not parse": (
        fence(ADD) + "or\n" + fence("def add(a, b)\n    return"),
        ADD,
    ),
    "an import in an earlier block": (
        fence("import math") + fence(ADD),
        ADD,
    ),  # the card takes one
    "a form feed and U+2028 in a string": (
        fence(ADD + "  # \f \u2028 x"),
        ADD + "  # \f \u2028 x",
    ),
    "a fence in a comment": (fence(ADD + "\n# ```\nx = 1"), ADD + "\n# ```\nx = 1"),
}
TEXTS = {  # the rule "text": name: (answer, code)
    "no block": (ADD + "\n\nThat is all.", ADD + "\n"),
    "a cut function after it": (ADD + "\ndef cut(x, y", ADD),
    "a cut string after it": (ADD + '\ntext = """cut', ADD),
    "prose before it": ("Sure: add it.\nimport math\n" + ADD + "\nDone!", "import math\n" + ADD),
    "empty": ("", ""),
    "a signature alone": (fence(STUB), fence(STUB)),
    "a class alone": (fence(CLASS),) * 2,
    "quoted": ("> ```python\n> " + ADD.replace("\n", "\n> ") + "\n> ```\n",) * 2,
    "no block defines it": (fence(HELPER) + fence("x = 1"),) * 2,
    "no block, after thinking": ("<think>" + fence(ADD) + "</think>" + ADD, ADD),
}


def test_the_last_block_that_defines_the_function():
    for name, (answer, code) in BLOCKS.items():
        assert select_function(answer, "add") == (code, "block"), name
        assert select_function(answer.replace("\n", "\r\n"), "add") == (code, "block"), name


def test_else_the_longest_program_or_the_whole_text():
    for name, (answer, code) in TEXTS.items():
        assert select_function(answer, "add") == (code, "text"), name


def test_endless_answers_are_read_in_time():
    # minutes if every pair of fences, or every part of a text that is no Python, were parsed
    began_s = time.process_time()
    noise = "".join(f"def word {i} of no Python(\n" for i in range(4000))
    for answer in ("```python\ndef add(a, b):\n" * 150, "```\n" * 500, noise, "(" * 100_000):
        assert select_function(answer, "add")[1] == "text"
    assert select_function(noise, "add")[0] == noise
    assert time.process_time() - began_s < 60
